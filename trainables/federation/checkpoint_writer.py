"""Writes checkpoints in a thread, so that a slow storage delays no round. A storage that fails is tried again later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from trainables.federation.checkpoints import ENDING, PAUSED, PackStorage, checkpoint_name

EVERY_S = 5.0  # a failed pack loses about this much, less than its new federation takes to start
SHARE = 0.02  # largest fraction of the time that is spent on creating checkpoints
RETRY_AT_MOST_S = 300.0  # longest delay between two attempts while the storage fails


class _Write(threading.Thread):
    """One checkpoint on its way to the storage."""

    def __init__(
        self, storage: PackStorage, keys: Sequence[str], t: int, checkpoint: bytes, ending: str = ENDING
    ) -> None:
        # a daemon: a storage that hangs must not keep the process alive
        super().__init__(name="fedsweep-checkpoint", daemon=True)
        self.name_of_checkpoint, self.round = checkpoint_name(keys), t
        self._storage, self._keys, self._checkpoint, self.ending = storage, keys, checkpoint, ending
        self._lock, self._unwanted, self.ended = threading.Lock(), False, False
        self.error: Exception | None = None
        self.seconds = 0.0
        self.is_overdue = False
        """Whether a deadline passed before the write ended. Later calls do not wait for this write again."""

    def run(self) -> None:
        began = time.monotonic()
        try:
            self._storage.save(self._keys, self.round, self._checkpoint, self.ending)
        except Exception as error:  # every kind of storage raises its own errors
            self.error = error
        self.seconds = time.monotonic() - began
        with self._lock:
            self.ended = True
            if self._unwanted:
                self._storage.remove(self.name_of_checkpoint)

    def discard(self) -> None:
        """Remove the checkpoint, now or once it is written, because it is not needed any more."""
        with self._lock:
            self._unwanted = True
            if self.ended:
                threading.Thread(target=self._storage.remove, args=(self.name_of_checkpoint,), daemon=True).start()


class CheckpointWriter:
    """Writes the checkpoints of one pack after another, with at most one write at a time."""

    def __init__(self, storage: PackStorage) -> None:
        self._storage = storage
        self._write: _Write | None = None
        self._failures = 0
        """Attempts that failed in a row."""
        self._keys: list[str] = []
        self._next = 0.0
        self.notes: list[str] = []
        """For the log: when the storage fails, and when it works again."""

    def start_pack(self, keys: Sequence[str]) -> None:
        self.poll()
        self._keys = list(keys)
        self.saved, self.saved_round = "", 0
        """Name and round of the pack's latest checkpoint that has been written."""
        self._next = max(time.monotonic() + EVERY_S, self._next if self._failures else 0.0)

    def save_if_due(self, t: int, checkpoint: Callable[[], bytes]) -> None:
        """Start to write a checkpoint if it is time for one and the last one is written."""
        self.poll()
        if self._write is None and time.monotonic() > self._next:
            self._start(t, checkpoint)

    def save_within(self, seconds: float, t: int, checkpoint: Callable[[], bytes]) -> bool:
        """Write a checkpoint of round `t` now. False if the storage fails or takes longer."""
        deadline = time.monotonic() + seconds
        self._wait(deadline)
        if self.saved and self.saved_round == t:
            return True
        if self._write is None:
            self._start(t, checkpoint)
            self._wait(deadline)
        return bool(self.saved) and self.saved_round == t

    def save_paused_within(self, seconds: float, keys: Sequence[str], t: int, content: bytes) -> bool:
        """Write the lanes of trials that stopped early. False if the storage fails or takes longer."""
        deadline = time.monotonic() + seconds
        self._wait(deadline)
        if self._write is not None:
            return False
        write = self._write = _Write(self._storage, keys, t, content, PAUSED)
        write.start()
        self._wait(deadline)
        return write.ended and write.error is None

    def end_pack(self) -> None:
        """Discard a checkpoint that is still being written, because the pack has ended or was dropped."""
        self.poll()
        if self._write is not None:
            self._write.discard()

    def _start(self, t: int, checkpoint: Callable[[], bytes]) -> None:
        began = time.monotonic()
        self._write = _Write(self._storage, self._keys, t, checkpoint())
        self._next = time.monotonic() + max(EVERY_S, (time.monotonic() - began) / SHARE)
        self._write.start()

    def _wait(self, deadline: float) -> None:
        if self._write is not None and not self._write.is_overdue:
            self._write.join(max(0.0, deadline - time.monotonic()))
            self._write.is_overdue = not self._write.ended
        self.poll()

    def poll(self) -> None:
        """Process the outcome of a write, if it has ended."""
        write = self._write
        if write is None or not write.ended:
            return
        self._write = None
        if write.error is not None:
            self._failures += 1
            delay = min(RETRY_AT_MOST_S, EVERY_S * 2**self._failures)
            self._next = time.monotonic() + delay
            if self._failures == 1:
                self.notes.append(
                    f"pack of {len(self._keys)} trials could not write a checkpoint: {write.error}; packs continue "
                    f"without checkpoints, and the storage is tried again after {delay:.0f} s, then less often"
                )
            return
        if self._failures:
            self.notes.append(f"checkpoints can be written again, after {self._failures} failed attempts")
            self._failures = 0
        self._next = max(self._next, time.monotonic() + write.seconds)  # writes take at most half the time
        if write.ending == ENDING and write.name_of_checkpoint == checkpoint_name(self._keys):
            self.saved, self.saved_round = write.name_of_checkpoint, write.round
