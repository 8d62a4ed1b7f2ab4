"""Peak memory of a process and all its descendants."""

from __future__ import annotations

import os
import threading
from pathlib import Path


class PeakMemory:
    """Peak memory of this process and all its descendants together, sampled every second. Shared pages count once."""

    def __init__(self) -> None:
        self.peak = 0
        self._end = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._end.wait(1.0):
            self.peak = max(self.peak, sum(_proportional_bytes(pid) for pid in _descendants(os.getpid())))


def _descendants(root: int) -> list[int]:
    """The ids of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue  # the process has ended
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    pids, queue = [], [root]
    while queue:
        pid = queue.pop()
        pids.append(pid)
        queue += children.get(pid, [])
    return pids


def _proportional_bytes(pid: int) -> int:
    """Proportional set size (PSS), which divides shared pages among the processes that share them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
