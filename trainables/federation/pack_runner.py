"""Runs packs on a federation, about half a second per call, with checkpoints and reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from trainables.federation.checkpoint_writer import CheckpointWriter
from trainables.federation.checkpoints import (
    PAUSED,
    CorruptCheckpointError,
    PackStorage,
    UnusableCheckpointError,
    checkpoint_name,
)
from trainables.federation.messages import Order, Report

CHUNK_S = 0.5  # target duration of a call's rounds
MOST_ROUNDS = 100  # of a call: rounds can become slower, and a call is not interrupted
LOAD_S = 60.0  # time limit for loading the checkpoint that a pack resumes from, or the lanes that it continues
SAVE_S = 10.0  # time limit for saving the lanes of trials that stopped early
HAND_BACK_S = 8.0  # time limit for the checkpoint when the node is about to leave; clouds give 15 s or more of notice


T = TypeVar("T")


class Federation(Protocol):
    """Runs one pack after the other: a `Server` in this process, or actors."""

    def lanes_that_fit(self, trials: list[Any], data: Any) -> int | None: ...
    def open(
        self, trials: list[Any], data: Any, checkpoint: bytes | None = None, paused: list[bytes] = ...
    ) -> None: ...
    def paused(self) -> tuple[list[str], bytes] | None: ...
    def progress(self, until: int) -> Any: ...
    def checkpoint(self) -> bytes: ...
    def close(self) -> None: ...


class PackRunner:
    """Runs a pack chunk by chunk. A failure of the federation is raised to the caller."""

    def __init__(self, slot: str, federation: Federation, storage: PackStorage) -> None:
        self.federation = federation
        self.order: Order | None = None
        """The pack that is running."""
        self._slot, self._storage = slot, storage
        self._writer = CheckpointWriter(storage)
        self._notes: list[str] = []

    def start(self, order: Order) -> None:
        self.order, self.trials = order, list(order.trials)
        self.t, self._chunk = 0, min(MOST_ROUNDS, self.trials[0].evaluate_every)
        self._reported_at = time.monotonic()
        self._opened = False
        self._writer.start_pack([trial.key for trial in self.trials])

    def advance(self) -> Report | None:
        """Run for about half a second. Returns a report if one is due."""
        assert self.order is not None
        if not self._opened:
            fits = self.federation.lanes_that_fit(self.trials, self.order.data)
            if fits is not None and fits < len(self.trials):
                return self.too_large(fits)
            self._open(self.order)
        until, began = min(self.trials[0].last_round, self.t + self._chunk), time.monotonic()
        progress = self.federation.progress(until)
        now = time.monotonic()
        self._chunk = max(1, min(MOST_ROUNDS, int((until - self.t) * CHUNK_S / max(1e-6, now - began))))
        self.t = progress.round
        state = {"round": self.t, "running": progress.running, "computing_s": progress.computing_s}
        if progress.running == 0:
            self._writer.end_pack()
            paused = self._save_paused() if self.trials[0].stop_after is not None else ""
            return self._report("ended", lanes=progress.results, paused=paused, **state)
        self._writer.save_if_due(self.t, self.federation.checkpoint)
        if now - self._reported_at > CHUNK_S or self._notes or self._writer.notes:
            self._reported_at = now
            return self._report("progress", **state)
        return None

    def too_large(self, fits: int) -> Report:
        """Give the pack back, because only `fits` of its lanes fit into memory."""
        return self._report("too large", fits=fits)

    def hand_back(self) -> Report | None:
        """Give the pack back with a checkpoint of its last round; None if it cannot be written in time."""
        assert self.order is not None
        if self._opened and not self._writer.save_within(HAND_BACK_S, self.t, self.federation.checkpoint):
            return None
        return self._report("handed back", round=self.t)

    def drop(self) -> Report:
        """Stop this attempt, because it is no longer needed."""
        self._writer.end_pack()
        return self._report("dropped")

    def _open(self, order: Order) -> None:
        """Open the pack on the federation. If its checkpoint cannot be loaded, the pack continues the lanes of shorter
        trials, if there are any. If these cannot be loaded, or what was loaded does not fit, it starts from round 0."""
        checkpoint = self._load(order.resume_from) if order.resume_from else None
        paused = self._load_paused(order.continue_from) if checkpoint is None else []
        try:
            self.federation.open(self.trials, order.data, checkpoint, paused)
        except UnusableCheckpointError as error:
            self._note_restart(f"its checkpoint cannot be used: {str(error).strip().splitlines()[-1]}")
            self.t = 0
            self.federation.open(self.trials, order.data)
        self._opened = True

    def _load(self, name: str) -> bytes | None:
        try:
            self.t, checkpoint = _within(LOAD_S, lambda: self._storage.load(name))
            return checkpoint
        except FileNotFoundError:
            reason = "no checkpoint"
        except CorruptCheckpointError:
            reason = "its checkpoint is corrupt, another user's, or of other code"
        except Exception as error:  # every kind of storage raises its own errors
            reason = f"its checkpoint cannot be read: {error}"
        self._note_restart(reason)
        return None

    def _load_paused(self, names: Sequence[str]) -> list[bytes]:
        try:
            loaded = _within(LOAD_S, lambda: [self._storage.load(name, PAUSED) for name in names])
        except CorruptCheckpointError:
            self._note_restart("the state of shorter trials is corrupt, another user's, or of other code")
            return []
        except Exception as error:  # missing, or an error of the storage
            self._note_restart(f"the state of shorter trials cannot be read: {error}")
            return []
        self.t = max((t for t, _ in loaded), default=0)
        return [content for _, content in loaded]

    def _save_paused(self) -> str:
        """Write the lanes of trials that stopped early. Returns the name of the file; empty if they cannot continue."""
        try:
            paused = self.federation.paused()
            if paused is None:
                return ""
            keys, content = paused
            if self._writer.save_paused_within(SAVE_S, keys, self.t, content):
                return checkpoint_name(keys)
            reason = f"not within {SAVE_S:.0f} s"
        except Exception as error:  # of the federation
            reason = str(error)
        self._notes.append(f"the state of {len(self.trials)} trials could not be written: {reason}")
        return ""

    def _note_restart(self, reason: str) -> None:
        self._notes.append(f"pack of {len(self.trials)} trials restarts from round 0: {reason}")

    def _report(self, kind: Any, **fields: Any) -> Report:
        """Every report except `progress` ends the pack on this slot."""
        assert self.order is not None
        number, notes = self.order.number, (*self._notes, *self._writer.notes)
        self._notes, self._writer.notes = [], []
        if kind != "progress":
            self.order = None
        saved, saved_round = self._writer.saved, self._writer.saved_round
        return Report(self._slot, number, kind, notes=notes, checkpoint=saved, checkpoint_round=saved_round, **fields)


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Call in a thread: a storage that hangs must not hang the slot."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # every kind of storage raises its own errors
            answer.set_exception(error)

    threading.Thread(target=run, name="fedsweep-load", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"the storage has not answered for {seconds:g} s") from None
