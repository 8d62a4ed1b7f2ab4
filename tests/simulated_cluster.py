"""The scheduler with slots that run packs at once, without Ray."""

from pathlib import Path

from orchestrator.execution.packing import Capacity
from orchestrator.execution.scheduler import Scheduler
from orchestrator.execution.sweep import Sweep
from orchestrator.results.ledger import Ledger
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.study import Study
from trainables.federation.federation_size import FederationSize
from trainables.federation.lane_result import METRICS, LaneResult
from trainables.federation.messages import Failure, Order, Report
from trainables.federation.trial_spec import TrialSpec


class Cluster:
    """Slots ask for packs, and report to the scheduler directly."""

    def __init__(self, folder: Path, of: Study, lanes: int = 128, federations: int = 1, storage=None) -> None:
        self._writing = Ledger.write(folder)
        self.ledger = self._writing.__enter__()
        self.ledger.add_study(of.model_dump_json(), "by hand")
        self.changes = 0
        sweep = Sweep(PreparedStudy.prepare(of), self.ledger)
        size = Capacity(FederationSize(), federations, lanes)
        self.scheduler = Scheduler(sweep, size, self._changed, storage)
        self.desk: list[Order] = []

    def _changed(self, scheduler: Scheduler) -> None:
        self.changes += 1

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.scheduler.close()
        self._writing.__exit__(*error)

    def offer(self) -> None:
        self.desk += self.scheduler.next_orders()

    def take(self, slot: str = "slot", node: str = "node") -> tuple[int, list[TrialSpec]] | None:
        """The number and the trials of the pack that a slot starts; None if no pack is offered."""
        self.offer()
        self.desk = [order for order in self.desk if order.number not in self.scheduler.superseded]
        order = next((order for order in self.desk if node not in order.not_on), None)
        if order is None:
            return None
        self.desk.remove(order)
        self.report(order.number, "started", slot=slot, nodes=(node,))
        return order.number, order.trials

    def report(self, number: int, kind: str, slot: str = "slot", **fields) -> None:
        self.scheduler.receive([Report(slot, number, kind, **fields)])

    def complete(self, number: int, trials, judge) -> None:
        lanes = [lane_result(trial, judge(trial)) for trial in trials]
        self.report(number, "ended", round=trials[0].rounds, computing_s=1.0, lanes=lanes)

    def run(self, judge, fails=lambda pack: False, reason="RuntimeError: on purpose") -> list[int]:
        """Run to the end; the size of the pack in every attempt."""
        sizes = []
        while not self.scheduler.stopping and (found := self.take()):
            number, pack = found
            sizes.append(len(pack))
            if fails(pack):
                self.scheduler.slot_failed("slot", Failure(reason))
            else:
                self.complete(number, pack, judge)
        return sizes


def lane_result(trial: TrialSpec, outcome) -> LaneResult:
    state, accuracy, loss = outcome
    metrics = {name: {} for name in METRICS}
    if state == "done":
        metrics["accuracy"], metrics["loss"] = {trial.rounds: accuracy}, {trial.rounds: loss}
    return LaneResult(trial.key, state, trial.rounds, metrics, 0.5)
