"""Trials that do not fit into a device's memory, although they are alone in their pack.

The memory may be in use. If other packs of the study run on the device, fewer packs run at a time for a while. If none
does, another program may use it: the trial waits, and fails if it still does not fit after that.
"""

from __future__ import annotations

import time

from orchestrator.execution.pack_queue import Pack
from trainables.federation.pack import PackGroup, pack_group

WAIT_S = 60.0  # a trial that was alone on its device waits this long before it is tried again
TRIES = 3  # of such a trial, before it fails
FEWER_FOR_S = 600.0  # a slot stays idle this long; then it is tried whether one more pack fits


class MemoryWaits:
    def __init__(self) -> None:
        self._waiting: list[tuple[float, Pack]] = []
        """Packs, and when they are queued."""
        self._idle_until: list[float] = []
        """For every slot that stays idle, until when."""
        self._too_large: set[PackGroup] = set()
        """Groups of trials of which one has failed: others are not tried again."""

    @property
    def active(self) -> bool:
        """Whether memory is short at the moment."""
        return bool(self._waiting or self._idle_now())

    def usable(self, slots: int) -> int:
        """How many of these slots may run packs now."""
        return max(1, slots - self._idle_now())

    def _idle_now(self) -> int:
        if self._idle_until:
            now = time.monotonic()
            self._idle_until = [until for until in self._idle_until if until > now]
        return len(self._idle_until)

    def due(self) -> list[Pack]:
        """Packs that have waited long enough, which are to be queued."""
        if not self._waiting:
            return []
        now = time.monotonic()
        due = [pack for at, pack in self._waiting if at <= now]
        self._waiting = [(at, pack) for at, pack in self._waiting if at > now]
        return due

    def is_hopeless(self, pack: Pack) -> bool:
        """Whether this trial, or one like it, has been tried often enough."""
        return len(pack.too_large_on) >= TRIES or pack_group(pack.trials[0]) in self._too_large

    def wait(self, pack: Pack) -> None:
        self._waiting.append((time.monotonic() + WAIT_S, pack))

    def run_fewer(self) -> None:
        """Keep one more slot idle."""
        self._idle_until.append(time.monotonic() + FEWER_FOR_S)

    def failed(self, pack: Pack) -> None:
        """The trial has failed: it, and others like it, need no idle slots."""
        self._too_large.add(pack_group(pack.trials[0]))
        self._idle_until.clear()
