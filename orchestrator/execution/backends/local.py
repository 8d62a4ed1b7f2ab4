"""Runs a sweep in this process, without Ray: one federation, one pack after the other.

For debugging, notebooks, tests and small studies. Results are the same as on Ray, byte for byte.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from dataclasses import replace
from functools import cache

import torch

from orchestrator.execution.backends.base import StopMonitor, SweepRun, scheduling, session_facts
from orchestrator.execution.host_memory import within_memory
from orchestrator.execution.packing import Capacity, lanes_per_pack
from orchestrator.execution.scheduler import Scheduler
from orchestrator.study.settings.resources import ResourceSettings
from trainables.code_identity import accelerator_name, code_identity, digest
from trainables.errors import UserError
from trainables.federation.federation_size import FederationSize
from trainables.federation.hosts import Hosts
from trainables.federation.memory_errors import is_out_of_memory
from trainables.federation.messages import Failure, Order, Report
from trainables.federation.pack_runner import PackRunner
from trainables.federation.problem import ProblemData
from trainables.federation.server import Server
from trainables.models import kernels
from trainables.models.kernel_build import kernel_build

SLOT = "local"
IDLE_S = 0.05  # between two questions for a pack, if all packs wait for memory


class LocalBackend:
    def check(self, resources: ResourceSettings, clients: int) -> None:
        self._capacity(resources, clients)

    def run(self, sweep_run: SweepRun) -> None:
        prepared = sweep_run.sweep.prepared
        capacity = self._capacity(sweep_run.resources, prepared.most_clients)
        capacity = within_memory(capacity, sweep_run.resources, prepared.most_weights)
        sweep_run.view.started(sweep_run.sweep, capacity)
        sweep_run.sweep.ledger.begin_session({**session_facts(capacity), "nodes": "1"})
        threads = torch.get_num_threads()
        try:
            with sweep_run.view, scheduling(sweep_run, capacity) as scheduler:
                _Slot(sweep_run, scheduler).run_packs()
        finally:
            torch.set_num_threads(threads)  # a federation on the CPU sets one thread

    @staticmethod
    def _capacity(resources: ResourceSettings, clients: int) -> Capacity:
        gpus = resources.gpus_per_host
        if gpus == "auto":
            gpus = float(torch.cuda.is_available())
        elif gpus and not torch.cuda.is_available():
            raise UserError(f"resources: gpus_per_host = {gpus:g}, and this process sees no GPU")
        hosts = 1 if resources.hosts == "auto" else min(resources.hosts, clients)
        size = FederationSize(hosts, gpus_per_host=gpus)
        return Capacity(size, 1, lanes_per_pack(resources, size.device))


class _Slot:
    """The only slot of a local run."""

    def __init__(self, sweep_run: SweepRun, scheduler: Scheduler) -> None:
        self._scheduler, self._storage = scheduler, sweep_run.location.checkpoints
        scheduler.health.names[SLOT] = platform.node()
        self._stop_monitor = StopMonitor(sweep_run, scheduler)
        problems = sweep_run.sweep.prepared.problems
        self._data = cache(lambda key: ProblemData.of(problems[key]))
        device = scheduler.queue.capacity.size.device
        self._code = digest(code_identity(kernel_build(kernels.chosen(device))), accelerator_name(device))
        self._runner = self._new_runner()

    def _new_runner(self) -> PackRunner:
        size = self._scheduler.queue.capacity.size
        return PackRunner(SLOT, Server(Hosts(size.hosts, size.device), size.device), self._storage)

    def run_packs(self) -> None:
        orders: deque[Order] = deque()
        while not self._scheduler.over:
            self._stop_monitor.check()
            orders.extend(self._scheduler.next_orders())
            if self._scheduler.stopping:
                self._scheduler.withdraw(order.number for order in orders)
                orders.clear()
            elif orders:
                self._run(orders.popleft())
            else:
                time.sleep(IDLE_S)

    def _run(self, order: Order) -> None:
        self._scheduler.receive([Report(SLOT, order.number, "started", nodes=(SLOT,), code=self._code)])
        self._runner.start(replace(order, data=self._data(order.trials[0].problem.key)))
        while self._runner.order is not None:
            try:
                report = self._runner.advance()
            except Exception as error:  # a trial may raise anything; it is handled like a failed slot
                failed, self._runner = self._runner, self._new_runner()
                if not is_out_of_memory(error):
                    self._scheduler.slot_failed(SLOT, Failure(f"{type(error).__name__}: {error}"))
                    return
                report = failed.too_large(len(failed.trials) // 2)
            if report is not None:
                self._scheduler.receive([report])
            self._stop_monitor.check()
