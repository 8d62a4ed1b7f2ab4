"""Messages between the scheduler and the slots that run packs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Order:
    """A pack to run."""

    number: int
    """Number of this attempt: a pack that is retried gets a new one."""
    trials: Any
    """A list of trials; pickled while it passes through Ray."""
    resume_from: str = ""
    """Name of the checkpoint to resume from."""
    continue_from: tuple[str, ...] = ()
    """Names of the files with the state of its lanes, if its trials continue trials of an earlier rung."""
    data: Any = None
    """The `ProblemData` of the trials; an object reference while it passes through Ray."""
    not_on: tuple[str, ...] = ()
    """Ids of the nodes that must not run it, because they are slow or an attempt failed there."""


@dataclass(frozen=True)
class Report:
    """What a slot reports about a pack."""

    slot: str
    number: int
    kind: Literal["alive", "started", "progress", "ended", "too large", "handed back", "dropped", "lost"]
    """alive: a heartbeat without news. handed back: the slot's node is about to leave the cluster. dropped: this
    attempt is no longer needed, for example because another slot has finished the pack. lost: sent by the desk, if
    the slot's process died after the desk had handed it the pack."""
    round: int = 0
    """The last round computed."""
    running: int = 0
    """Lanes that have not ended."""
    computing_s: float = 0.0
    """Seconds spent in rounds."""
    lanes: Any = ()
    """ended: the result of every trial; pickled while it passes through Ray."""
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
    accelerator: str = ""
    """started: the model of the federation's GPUs."""
    code: str = ""
    """started: digest of the federation's code, kernel, libraries and kind of device."""


@dataclass(frozen=True)
class Failure:
    """Why a slot failed."""

    reason: str
    kind: Literal["error", "node died", "out of memory", "other code", "left"] = "error"
    """other code: the process has other code than the driver. left: the slot ended because its node gets no more
    packs."""
    node: str = ""
    """Id of the node at fault; empty if it is not known, or is the slot's own."""
