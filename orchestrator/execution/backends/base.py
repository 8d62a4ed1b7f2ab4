"""What a backend does: it runs the packs of a sweep, until all trials have ended or the run is stopped."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import platform
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.execution.node_health import NodeHealth
from orchestrator.execution.packing import Capacity
from orchestrator.execution.progress import View
from orchestrator.execution.scheduler import Scheduler
from orchestrator.execution.sweep import Sweep
from orchestrator.results.locations import ResultsLocation
from orchestrator.study.settings.resources import ResourceSettings
from trainables.code_identity import code_identity, digest
from trainables.errors import UserError
from trainables.models import kernels
from trainables.models.kernel_build import kernel_build

log = logging.getLogger("fedsweep")
STOPPING = "stopping after the packs in flight; another Ctrl-C stops at once"


@dataclass(frozen=True)
class SweepRun:
    """A sweep to run, where its results go, and when it must stop."""

    sweep: Sweep
    resources: ResourceSettings
    location: ResultsLocation
    view: View
    deadline: float = math.inf
    """On the clock of `time.monotonic`."""

    def stop_reason(self) -> str:
        """Why the run should stop; empty if it should not. Raises KeyboardInterrupt if it should stop at once."""
        if (request := self.location.stop_requested()) == "now":
            log.warning("cancelled: stopping now")
            raise KeyboardInterrupt
        if time.monotonic() > self.deadline:
            return "the time limit is reached"
        return "cancelled" if request else ""

    def on_change(self, scheduler: Scheduler) -> None:
        """Called by the scheduler: publish what was recorded, and update the view."""
        # any change of this number means that the ledger changed
        self.location.notify_recorded(len(scheduler.sweep.outcomes) + scheduler.stall_changes)
        while scheduler.announcements:
            self.view.say(scheduler.announcements.pop(0))
        self.view.changed(scheduler)


class Backend(Protocol):
    def check(self, resources: ResourceSettings, clients: int) -> None:
        """Raise an error if no federation fits, before anything is started."""

    def run(self, sweep_run: SweepRun) -> None:
        """Run all trials that have not ended. Returns when none is left, or when the run was stopped."""


def session_facts(capacity: Capacity) -> dict[str, str]:
    """What the ledger records about the device and code of a session, because results of different devices differ in
    their last bits."""
    device = capacity.size.device
    kernel = kernels.chosen(device)
    code = code_identity(kernel_build(kernel))
    return {
        "device": f"{capacity.size.accelerator} {device}".strip(),
        "kernel": kernel,
        "machine": platform.machine(),
        "code": digest(code),
        "code parts": json.dumps(code),
    }


@contextlib.contextmanager
def scheduling(sweep_run: SweepRun, capacity: Capacity, health: NodeHealth | None = None) -> Iterator[Scheduler]:
    """A scheduler that Ctrl-C stops. At the end of the block, the checkpoints are removed unless trials can continue
    from them, and an error is raised if the scheduler has found that no trial can run."""
    storage = sweep_run.location.checkpoints
    storage.create()
    scheduler = Scheduler(sweep_run.sweep, capacity, sweep_run.on_change, storage, health)
    try:
        with _stop_on_signal(scheduler):
            yield scheduler
    finally:
        scheduler.close()
        storage.remove_all(even_if_used=sweep_run.sweep.finished)
    if scheduler.fatal_error:
        raise UserError(f"no trial can run here: {scheduler.fatal_error}")


class StopMonitor:
    """Stops a scheduler when there is a reason to, and tells the user once."""

    def __init__(self, sweep_run: SweepRun, scheduler: Scheduler) -> None:
        self._sweep_run, self._scheduler = sweep_run, scheduler
        self._announced = False

    def check(self) -> None:
        reason = self._sweep_run.stop_reason()
        if reason and not self._scheduler.stopping:
            self._scheduler.stopping = True
            log.warning("%s: stopping after the packs in flight", reason)
        if self._scheduler.stopping and not self._announced:
            self._announced = True  # not in the signal handler, which may interrupt another line of output
            self._sweep_run.view.say(STOPPING)


@contextlib.contextmanager
def _stop_on_signal(scheduler: Scheduler) -> Iterator[None]:
    """First Ctrl-C: finish the packs in flight. Second Ctrl-C or SIGTERM: stop at once. The ledger stays intact."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        if scheduler.stopping or number == signal.SIGTERM:
            raise KeyboardInterrupt
        scheduler.stopping = True
        log.warning(STOPPING)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
