"""Trials that do not fit into a device's memory, although they are alone in their pack.

The memory may be in use. If other packs of the study run on the node, one pack fewer runs at a time for a while. If
not, another program may use it. In both cases the trial waits; it fails if it repeatedly did not fit on its own.
"""

from __future__ import annotations

import time

from orchestrator.execution.pack_queue import Pack

WAIT_S = 60.0  # a trial waits this long before it is tried again
MOST_WAIT_S = 3600.0  # the wait doubles up to this, for a trial that did not fit next to others
TRIES = 3  # on its own, before a trial fails
FEWER_FOR_S = 120.0  # a slot stays idle this long; then it is tried whether one more pack fits


class MemoryWaits:
    def __init__(self) -> None:
        self._waiting: list[tuple[float, bool, Pack]] = []
        """When a pack is queued, and whether it was alone on its node."""
        self._idle_until: list[float] = []
        """For every slot that stays idle, until when."""
        self._short_until = 0.0

    @property
    def short(self) -> bool:
        """Whether memory was short a moment ago."""
        return time.monotonic() < self._short_until

    def wait(self, pack: Pack, *, alone: bool) -> float:
        """Returns for how many seconds the pack waits."""
        now, seconds = time.monotonic(), WAIT_S
        self._short_until = now + TRIES * WAIT_S
        if not alone:
            self._idle_until.append(now + FEWER_FOR_S)
            seconds = min(MOST_WAIT_S, WAIT_S * 2 ** (len(pack.crowded_on) - 1))
        self._waiting.append((now + seconds, alone, pack))
        return seconds

    def due(self, *, nothing_runs: bool) -> list[Pack]:
        """Packs that have waited long enough. If nothing runs, none has to wait for others."""
        if not self._waiting:
            return []
        now = time.monotonic()
        due, waiting = [], []
        for at, alone, pack in self._waiting:
            if at <= now or (nothing_runs and not alone):
                due.append(pack)
            else:
                waiting.append((at, alone, pack))
        self._waiting = waiting
        return due

    def usable(self, slots: int, slots_of_node: int) -> int:
        """How many of these slots may run packs now. The slots of one node at most stay idle, except one."""
        if not self._idle_until:
            return slots
        now = time.monotonic()
        self._idle_until = [until for until in self._idle_until if until > now]
        return slots - min(len(self._idle_until), slots_of_node - 1)
