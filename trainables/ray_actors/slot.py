"""A slot of the cluster as a Ray Tune trial: one federation that stays and runs pack after pack.

Tune gives the slot its placement group, starts it again where it died, and never hears of the packs: those come from
the desk, and what became of them goes back there.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import ray
from ray import tune
from ray.exceptions import RayActorError, RayTaskError

from trainables.federation.checkpoints import DamagedError, PackStorage, name_of
from trainables.ray_actors.desk import Order, Report

STEP_S = 1.0  # how long Tune waits for a sign of life; it costs the driver a few milliseconds
CHUNK_S = 0.5  # how long the rounds between two looks at the clock are to take
IDLE_S = 2.0  # how long a slot without a pack waits at the desk at a time
CHECKPOINT_EVERY_S = 5.0  # less than a new federation takes to start, which a pack that dies costs anyway
CHECKPOINT_SHARE = 0.02  # of the time, at most, goes into checkpoints


def short_of_memory(error: Exception | str) -> bool:
    """Whether it was memory that was missing: torch's on a device, or a node's, whose Ray then ends a process."""
    cause = getattr(error, "cause", None)
    said = str(error)
    return type(cause).__name__ == "OutOfMemoryError" or "OUT_OF_MEMORY" in said or "running low on memory" in said


class FederationLike(Protocol):
    """What a slot asks of its federation."""

    def open(self, trials: list[Any], shipment: Any, snapshot: bytes | None = None) -> None: ...
    def lanes_that_fit(self, trials: list[Any], shipment: Any) -> int | None: ...
    def progress(self, until: int) -> Any: ...
    def results(self) -> bytes: ...
    def snapshot(self) -> bytes: ...
    def close(self) -> None: ...


class PackSlot(tune.Trainable):
    def setup(
        self,
        config: dict[str, Any],
        desk: Any,
        start: Callable[[], FederationLike],
        storage: PackStorage,
    ) -> None:
        self._desk, self._start, self._checkpoints = desk, start, storage
        self._slot, self._node = config["slot"], ray.get_runtime_context().get_node_id()
        self._order: Order | None = None
        self._ended = 0
        self._notes: list[str] = []
        self.federation = start()

    def step(self) -> dict[str, Any]:
        """Runs what there is to run, over the ends of packs, for about a second."""
        end, patience = time.monotonic() + STEP_S, IDLE_S
        while True:
            if self._order is None:
                order = ray.get(self._desk.take.remote(self._slot, self._node, patience))
                if order is None:
                    break
                self._open(order)
            self._advance()
            patience = 0.0  # whoever has ended a pack and finds no other wakes the driver by returning
            if time.monotonic() > end:
                break
        return {"packs": self._ended}

    # ---- a pack

    def _open(self, order: Order) -> None:
        self._order = order
        self.trials: list[Any] = pickle.loads(order.trials)
        self.t, self._chunk = 0, self.trials[0].evaluate_every
        self._saved = ""
        self._saved_at = self._told_at = time.monotonic()
        self._interval = CHECKPOINT_EVERY_S
        self._snapshot = self._found(order.resume_from) if order.resume_from else None
        self._opened = False

    def _found(self, name: str) -> bytes | None:
        """A checkpoint that cannot be used costs time, and is no reason to fail."""
        try:
            self.t, snapshot = self._checkpoints.load(name)
            return snapshot
        except FileNotFoundError:
            reason = "no checkpoint"
        except DamagedError:
            reason = "its checkpoint is damaged"
        except Exception as error:  # every kind of storage fails in its own way
            reason = f"its checkpoint cannot be read: {error}"
        self._note_new_start(reason)
        return None

    def _note_new_start(self, reason: str) -> None:
        self._notes.append(f"pack of {len(self.trials)} trials starts again from round 0: {reason}")

    def _advance(self) -> None:
        """To the next evaluation, or about half a second on."""
        assert self._order is not None
        first, shipment = self.trials[0], self._order.shipment
        try:
            if not self._opened:
                fits = self.federation.lanes_that_fit(self.trials, shipment)
                if fits is not None and fits < len(self.trials):
                    self._close("too large", fits=fits)
                    return
                self._open_federation(shipment)
                self._opened, self._snapshot = True, None
            evaluation = min((self.t // first.evaluate_every + 1) * first.evaluate_every, first.last_round)
            until, began = min(evaluation, self.t + self._chunk), time.monotonic()
            progress = self.federation.progress(until)
        except (RayTaskError, RayActorError) as error:
            if not short_of_memory(error):
                raise
            # new processes: in the old ones memory may be in pieces, or a recording half made
            self.federation.close()
            self.federation = self._start()
            self._close("too large", fits=len(self.trials) // 2)
            return
        took = max(1e-6, time.monotonic() - began)
        self._chunk = max(1, int((until - self.t) * CHUNK_S / took))
        self.t = until
        state = {"round": self.t, "running": progress.running, "computing_s": progress.computing_s}
        if progress.running == 0:
            self._ended += 1
            self._close("ended", lanes=self.federation.results(), **state)
            return
        now = time.monotonic()
        if now - self._saved_at > self._interval and self._can_save:
            self._save()
        if now - self._told_at > CHUNK_S or self._notes:
            self._told_at = now
            self._tell("went on", **state)

    def _open_federation(self, shipment: Any) -> None:
        """A checkpoint that was read but cannot be gone on from costs time, too, and no more."""
        try:
            self.federation.open(self.trials, shipment, self._snapshot)
        except RayTaskError as error:
            if self._snapshot is None or short_of_memory(error):
                raise
            self._note_new_start(f"its checkpoint is of no use: {str(error).strip().splitlines()[-1]}")
            self.t = 0
            self.federation.open(self.trials, shipment)

    def _close(self, kind: Any, **said: Any) -> None:
        """Waits until it was heard: whoever comes for the next pack before that would seem to have lost this one."""
        ray.get(self._tell(kind, **said))
        self._order = None

    def _tell(self, kind: Any, **said: Any) -> Any:
        assert self._order is not None
        notes, self._notes = tuple(self._notes), []
        report = Report(self._slot, self._order.number, kind, saved=self._saved, notes=notes, **said)
        return self._desk.tell.remote(report)

    # ---- checkpoints

    @cached_property
    def _can_save(self) -> bool:
        """Another node may not see the driver's folder: a pack that dies there starts again from round 0."""
        return self._checkpoints.within_reach()

    def _save(self) -> None:
        """A checkpoint that finds no room costs time if the pack should die, but no reason to let it die now."""
        began, keys = time.monotonic(), [trial.key for trial in self.trials]
        try:
            self._checkpoints.save(keys, self.t, self.federation.snapshot())
            self._saved = name_of(keys)
        except Exception as error:  # every kind of storage fails in its own way
            self._notes.append(f"pack of {len(keys)} trials could not leave a checkpoint: {error}")
        self._saved_at = time.monotonic()
        self._interval = max(CHECKPOINT_EVERY_S, (self._saved_at - began) / CHECKPOINT_SHARE)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing: packs have checkpoints of their own, which outlive the slot."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing."""

    def cleanup(self) -> None:
        self.federation.close()
