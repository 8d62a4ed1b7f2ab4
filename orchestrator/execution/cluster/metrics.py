"""What a cluster's own monitoring sees of a study: through Ray, as Prometheus reads it."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from orchestrator.execution.scheduler import Conductor


class Metrics:
    """Trials that ended, rounds of trials, packs that were tried again, and packs in flight, by study."""

    def __init__(self, conductor: Conductor) -> None:
        tags = {"tag_keys": ("study",)}
        self._counters = {
            "trials": Counter("fedsweep_trials", "Trials that have ended.", **tags),
            "rounds": Counter("fedsweep_rounds", "Rounds of single trials that were run.", **tags),
            "faults": Counter("fedsweep_faults", "Packs that were tried again.", **tags),
        }
        self._in_flight = Gauge("fedsweep_packs_in_flight", "Packs that federations work on.", **tags)
        for metric in (*self._counters.values(), self._in_flight):
            metric.set_default_tags({"study": conductor.sweep.blueprint.study.name})
        self._before = self._read(conductor)

    def update(self, conductor: Conductor) -> None:
        now = self._read(conductor)
        for name, counter in self._counters.items():
            if now[name] > self._before[name]:
                counter.inc(now[name] - self._before[name])
        self._before = now
        self._in_flight.set(len(conductor.in_flight))

    @staticmethod
    def _read(conductor: Conductor) -> dict[str, int]:
        return {
            "trials": len(conductor.sweep.outcomes),
            "rounds": conductor.lane_rounds,
            "faults": conductor.retries,
        }
