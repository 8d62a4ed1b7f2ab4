"""Messages between the scheduler and the slots that run packs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Order:
    """A pack to run."""

    number: int
    """Of this attempt: a pack that is retried gets a new number."""
    trials: Any
    """A list of trials; on its way through Ray, that list pickled."""
    resume_from: str = ""
    """Name of the checkpoint to resume from."""
    continue_from: tuple[str, ...] = ()
    """Names of the files with the state of its lanes, if all its trials continue shorter ones."""
    data: Any = None
    """The `ProblemData` of the trials; on its way through Ray, a reference to it."""
    not_on: tuple[str, ...] = ()
    """Ids of nodes that are slow at it: this order is a copy, for another node."""


@dataclass(frozen=True)
class Report:
    """What a slot reports about a pack."""

    slot: str
    number: int
    kind: Literal["alive", "started", "progress", "ended", "too large", "handed back", "dropped", "lost"]
    """alive: a heartbeat, about no pack. handed back: its node is about to leave the cluster. dropped: another slot was
    faster. lost: reported by the
    desk, about a pack whose slot died before it received the pack."""
    round: int = 0
    running: int = 0
    computing_s: float = 0.0
    lanes: Any = ()
    """ended: the result of every trial; on its way through Ray, pickled."""
    fits: int = 0
    """too large: how many lanes fit into the device's memory."""
    checkpoint: str = ""
    """Name of the pack's latest checkpoint."""
    checkpoint_round: int = 0
    paused: str = ""
    """ended: name of the file with the state of lanes that may continue."""
    notes: tuple[str, ...] = ()
    """Problems that the slot has recovered from, for the log."""
    nodes: tuple[str, ...] = ()
    """started: the ids of the nodes of the slot and its federation, the slot's own first."""


@dataclass(frozen=True)
class Failure:
    """Why a slot failed."""

    reason: str
    kind: Literal["error", "node died", "out of memory", "other code", "left"] = "error"
    """other code: than the driver's. left: the slot ended because its node gets no more packs."""
    node: str = ""
    """Id of the node at fault, if it is known to be another one than the slot's."""
