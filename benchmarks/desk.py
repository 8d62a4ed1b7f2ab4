"""The driver and the desk with simulated slots: how much of a core they need, and how long slots wait.

    python -m benchmarks.desk 500 2000        this many slots, packs of 60 seconds

The scheduler, the ledger and the desk are real, the desk in its own process. Only Tune is missing: the driver's loop
runs as often as Tune would run it. Simulated slots share two processes. Each sends heartbeats with a report at the
pace that the desk asks for, ends its pack with made-up results, and takes the next. The first packs have random
lengths, so packs end at different times. `python -m benchmarks.scaling table` prints the measurements.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from benchmarks import scaling
from orchestrator.execution.backends.base import SweepRun, scheduling
from orchestrator.execution.backends.ray import MOST_SLOTS, SlotSearcher, SweepCallback
from orchestrator.execution.cluster.connect import connected
from orchestrator.execution.packing import Capacity
from orchestrator.execution.progress import View
from orchestrator.execution.sweep import Sweep
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import results_location
from orchestrator.study.cells import PreparedStudy
from trainables.federation.federation_size import FederationSize
from trainables.federation.messages import Order, Report
from trainables.ray_actors.desk import STEPS_PER_S, Pace, PackDesk

PROCESSES = 2
PACK_S, MEASURED_S = 60.0, 40.0
LANES = 16
PACKS = 8  # per slot; about half of them, the coarse stage, can start at once


class MeasuredDesk(PackDesk):
    """Counts the messages of slots."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = 0

    async def take(self, *arguments: Any, **options: Any) -> Any:
        self.messages += 1
        return await super().take(*arguments, **options)

    async def alive(self, *arguments: Any) -> Any:
        self.messages += 1
        return await super().alive(*arguments)

    async def used(self) -> tuple[float, int]:
        """CPU seconds and messages so far."""
        return time.process_time(), self.messages


class Slots:
    """Many slots in one process."""

    def __init__(self, desk: Any) -> None:
        self.desk = desk
        self.heartbeats: list[float] = []
        """Seconds until each heartbeat was answered."""
        self.waits: list[float] = []
        """Seconds between the end of a pack and the start of the next."""

    async def run(self, names: list[str], since: float, until: float) -> tuple[list[float], list[float]]:
        await asyncio.gather(*(self._slot(name, since, until) for name in names))
        return self.heartbeats, self.waits

    async def _slot(self, name: str, since: float, until: float) -> None:
        pace, ended, seconds, last = Pace.of(1), 0.0, random.uniform(1, PACK_S), None
        while time.time() < until:
            order, last = await self.desk.take.remote(name, ["node"], 0.0, last=last), None
            while order is None and time.time() < until:
                order = await self.desk.take.remote(name, ["node"], pace.idle_s)
            if order is None:
                return
            if ended > since:
                self.waits.append(time.time() - ended)
            end = time.time() + seconds
            while (left := end - time.time()) > 0 and time.time() < until:
                await asyncio.sleep(min(left, pace.heartbeat_s))
                sent = time.time()
                progress = Report(name, order.number, "progress", round=1, running=LANES)
                pace = (await self.desk.alive.remote(name, ["node"], progress)).pace
                if sent > since:
                    self.heartbeats.append(time.time() - sent)
            ended = time.time()
            last = _result(name, order)
            seconds = PACK_S


def _result(slot: str, order: Order) -> Report:
    trials = pickle.loads(order.trials)
    lanes = pickle.dumps([scaling.made_up(trial) for trial in trials])
    return Report(slot, order.number, "ended", trials[0].last_round, lanes=lanes)


def measure(slots: int) -> dict[str, float]:
    study = scaling.study(slots * LANES * PACKS)
    with connected(cpus=slots), tempfile.TemporaryDirectory(prefix="fedsweep-desk-") as folder:
        desk = ray.remote(MeasuredDesk).options(num_cpus=0, max_concurrency=MOST_SLOTS).remote()
        actors = [ray.remote(Slots).options(num_cpus=0).remote(desk) for _ in range(PROCESSES)]
        with Ledger.write(Path(folder)) as ledger:
            run = SweepRun(
                Sweep(PreparedStudy.prepare(study), ledger), study.resources, results_location(folder), View()
            )
            with scheduling(run, Capacity(FederationSize(), slots, LANES)) as scheduler:
                driver = SweepCallback(run, scheduler, SlotSearcher(scheduler), desk, lambda key: None, elastic=False)
                until = time.time() + PACK_S + MEASURED_S
                since = until - MEASURED_S
                names = [f"slot {number}" for number in range(slots)]
                slices = [names[k::PROCESSES] for k in range(PROCESSES)]
                running = [actor.run.remote(some, since, until) for actor, some in zip(actors, slices, strict=True)]
                _drive(driver, since)
                before = time.time(), time.process_time(), *ray.get(desk.used.remote())
                _drive(driver, until)
                after = time.time(), time.process_time(), *ray.get(desk.used.remote())
                ray.get(desk.close.remote())
                found = ray.get(running)
                scheduler.stopping = True
    seconds, driver_s, desk_s, messages = (now - then for now, then in zip(after, before, strict=True))
    heartbeats, waits = ([second for times in found for second in times[kind]] for kind in range(2))
    return {
        "messages_per_s": messages / seconds,
        "message_cpu_ms": 1000 * desk_s / messages,
        "desk_share_of_core": desk_s / seconds,
        "driver_share_of_core": driver_s / seconds,
        "packs": len(waits),
        **_quantiles("heartbeat", heartbeats),
        **_quantiles("wait", waits),
    }


def _drive(driver: SweepCallback, until: float) -> None:
    while time.time() < until:
        driver.on_step_begin(0, [])
        time.sleep(1 / STEPS_PER_S)


def _quantiles(name: str, seconds: list[float]) -> dict[str, float]:
    found = statistics.quantiles(seconds, n=100)
    return {f"{name}_ms": 1000 * found[49], f"{name}_99_ms": 1000 * found[98]}


def main() -> None:
    for slots in map(int, sys.argv[1:]):
        machine, found = scaling.machine_and_load(), measure(slots)
        print(slots, found, flush=True)
        scaling.save("desk", str(slots), found, machine)


if __name__ == "__main__":
    main()
