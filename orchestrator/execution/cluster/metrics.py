"""Metrics for the cluster's own monitoring, exported by Ray for Prometheus."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from orchestrator.execution.scheduler import Scheduler


class Metrics:
    """Ended trials, computed rounds, retried packs and packs in flight, by study."""

    def __init__(self, scheduler: Scheduler) -> None:
        tags = {"tag_keys": ("study",)}
        self._counters = {
            "trials": Counter("fedsweep_trials", "Trials that have ended.", **tags),
            "rounds": Counter("fedsweep_rounds", "Rounds of single trials.", **tags),
            "faults": Counter("fedsweep_faults", "Retried packs.", **tags),
        }
        self._in_flight = Gauge("fedsweep_packs_in_flight", "Packs that federations run.", **tags)
        for metric in (*self._counters.values(), self._in_flight):
            metric.set_default_tags({"study": scheduler.sweep.prepared.study.name})
        self._before = self._read(scheduler)

    def update(self, scheduler: Scheduler) -> None:
        now = self._read(scheduler)
        for name, counter in self._counters.items():
            if now[name] > self._before[name]:
                counter.inc(now[name] - self._before[name])
        self._before = now
        self._in_flight.set(len(scheduler.in_flight))

    @staticmethod
    def _read(scheduler: Scheduler) -> dict[str, int]:
        return {
            "trials": len(scheduler.sweep.outcomes),
            "rounds": scheduler.lane_rounds,
            "faults": scheduler.retries,
        }
