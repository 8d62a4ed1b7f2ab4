"""A view that records when each phase of a sweep ends, in seconds since the start of the process. It does not import
torch or Ray, because imports are part of the measured time."""

from __future__ import annotations

import os
import time
from pathlib import Path

from orchestrator.execution.packing import Capacity
from orchestrator.execution.progress import View
from orchestrator.execution.scheduler import Scheduler
from orchestrator.execution.sweep import Sweep

FIRST_ROUND = "start of slot and federation, kernels compiled, first pack opened"


def process_start() -> float:
    """When this process started, according to the kernel if /proc exists, else now."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return time.time() - (uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, IndexError, ValueError):
        return time.time()


class Clock(View):
    def __init__(self) -> None:
        self.began, self.marks, self.computing_s, self.federations = process_start(), dict[str, float](), 0.0, 1

    def mark(self, what: str, at: float | None = None) -> None:
        """Record the end of a phase, unless it was recorded before."""
        self.marks.setdefault(what, (at or time.time()) - self.began)

    def say(self, sentence: str) -> None:
        pass

    def starting(self, sweep: Sweep) -> None:
        self.mark("study read, data loaded and partitioned")

    def started(self, sweep: Sweep, capacity: Capacity) -> None:
        self.mark("Ray started")
        self.federations = capacity.federations

    def changed(self, scheduler: Scheduler) -> None:
        if scheduler.computing_s and not self.computing_s:
            self.mark(FIRST_ROUND, time.time() - scheduler.computing_s)
        self.computing_s = scheduler.computing_s
