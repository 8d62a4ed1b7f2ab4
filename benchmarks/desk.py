"""The desk with simulated slots: how much of a core it needs, and how long slots wait for their next pack.

    python -m benchmarks.desk 500 2000        this many slots, packs of 60 seconds
    python -m benchmarks.desk queue           waiting times that follow from the measured CPU time per message

The desk is the real one, in its own process. Simulated slots share a few processes: each sends heartbeats with a report
at the pace that the desk asks for, ends its pack, and takes the next. The driver exchanges packs and reports every
0.1 s. The first packs have random lengths, so that packs end at different times. Adds to reports/scaling.json.

On a machine that has no free core for the desk, measured waiting times say nothing about it. `queue` simulates the
queue of messages in front of a desk with a core of its own, in simulated time.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import statistics
import sys
import time
from typing import Any

import ray

from orchestrator.execution.cluster.connect import connected
from trainables.federation.messages import Order, Report
from trainables.ray_actors.desk import Pace, PackDesk

PROCESSES = 2
PACK_S, MEASURED_S = 60.0, 40.0
QUEUED_S = 600.0  # of simulated time
ORDER, RESULT = 20_000, 60_000  # bytes: 128 trials


class MeasuredDesk(PackDesk):
    """Counts what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = 0

    async def take(self, *arguments: Any) -> Any:
        self.messages += 1
        return await super().take(*arguments)

    async def alive(self, *arguments: Any) -> Any:
        self.messages += 1
        return await super().alive(*arguments)

    async def report(self, *arguments: Any) -> None:
        self.messages += 1
        await super().report(*arguments)

    async def used(self) -> tuple[float, int]:
        """CPU seconds and messages so far."""
        return time.process_time(), self.messages


class Slots:
    """Many slots in one process."""

    def __init__(self, desk: Any) -> None:
        self.desk, self.waits = desk, []

    async def run(self, names: list[str], until: float) -> list[float]:
        """The seconds that slots waited between the end of a pack and the next."""
        await asyncio.gather(*(self._slot(name, until) for name in names))
        return self.waits

    async def _slot(self, name: str, until: float) -> None:
        pace, seconds = Pace.of(1), random.uniform(1, PACK_S)
        while time.time() < until:
            asked = time.time()
            order = await self.desk.take.remote(name, ["node"], pace.idle_s)
            if order is None:
                continue
            if seconds == PACK_S:
                self.waits.append(time.time() - asked)
            end = time.time() + seconds
            while (left := end - time.time()) > 0 and time.time() < until:
                await asyncio.sleep(min(left, pace.heartbeat_s))
                progress = Report(name, order.number, "progress", round=1)
                pace = (await self.desk.alive.remote(name, ["node"], progress)).pace
            await self.desk.report.remote(Report(name, order.number, "ended", lanes=bytes(RESULT)))
            seconds = PACK_S


def measure(slots: int) -> dict[str, float]:
    with connected(cpus=PROCESSES + 1):
        desk = ray.remote(MeasuredDesk).options(num_cpus=0, max_concurrency=10_000).remote()
        until = time.time() + PACK_S + MEASURED_S
        actors = [ray.remote(Slots).options(num_cpus=1).remote(desk) for _ in range(PROCESSES)]
        names = [f"slot {number}" for number in range(slots)]
        running = [actor.run.remote(names[k::PROCESSES], until) for k, actor in enumerate(actors)]
        trials, number, offered, began = pickle.dumps(bytes(ORDER)), 0, 0, None
        exchanges: list[float] = []
        while time.time() < until:
            orders = [Order(number + k, trials) for k in range(slots // 10 - offered)]
            number, offered = number + len(orders), offered + len(orders)
            sent = time.time()
            reports = ray.get(desk.exchange.remote(orders))
            exchanges.append(time.time() - sent)
            offered -= sum(report.kind == "started" for report in reports)
            if began is None and until - time.time() < MEASURED_S:
                began = time.time(), *ray.get(desk.used.remote())
            time.sleep(0.1)
        assert began is not None
        used, messages = ray.get(desk.used.remote())
        seconds = time.time() - began[0]
        waits = [wait for found in ray.get(running) for wait in found]
        return {
            "pack_s": PACK_S,
            "messages_per_s": (messages - began[2]) / seconds,
            "desk_share_of_core": (used - began[1]) / seconds,
            "exchange_ms": 1000 * statistics.median(exchanges),
            "wait_ms": 1000 * statistics.median(waits) if waits else float("nan"),
            "packs": len(waits),
        }


def queued(slots: int, seconds: float) -> dict[str, float]:
    """How long messages wait if the desk needs `seconds` of CPU time for each and handles them in their order."""
    pace, chance = Pace.of(slots), random.Random(0)
    arrivals: list[tuple[float, int]] = []
    """Time and number of messages: at the end of a pack a slot reports it, and takes the next."""
    for _ in range(slots):
        beat, end = chance.uniform(0, pace.heartbeat_s), chance.uniform(0, PACK_S)
        arrivals += [(beat + k * pace.heartbeat_s, 1) for k in range(int(QUEUED_S / pace.heartbeat_s))]
        arrivals += [(end + k * PACK_S, 2) for k in range(int(QUEUED_S / PACK_S))]
    free, beats, packs = 0.0, [], []
    for at, messages in sorted(arrivals):
        free = max(free, at) + messages * seconds
        (beats if messages == 1 else packs).append(1000 * (free - at))
    return {
        "queued_message_ms": statistics.median(beats),
        "queued_message_99_ms": statistics.quantiles(beats, n=100)[98],
        "queued_pack_ms": statistics.median(packs),
        "queued_pack_99_ms": statistics.quantiles(packs, n=100)[98],
        "queued_share_of_core": sum(messages for _, messages in arrivals) * seconds / QUEUED_S,
    }


def main() -> None:
    from benchmarks.scaling import REPORT, save

    if sys.argv[1:] == ["queue"]:
        for slots, measured in json.loads(REPORT.read_text())["desk"].items():
            found = queued(int(slots), measured["desk_share_of_core"] / measured["messages_per_s"])
            print(slots, found)
            save("desk", slots, found, machine=measured["machine"])
        return
    for slots in map(int, sys.argv[1:]):
        found = measure(slots)
        print(slots, found, flush=True)
        save("desk", str(slots), found)


if __name__ == "__main__":
    main()
