"""Run searches without Ray, with a pure function of the configuration in place of training."""

import math
from dataclasses import dataclass
from pathlib import Path

from handmade_ledgers import cell_id

from orchestrator.execution.sweep import Sweep
from orchestrator.results.ledger import Ledger, Row, StageKey
from orchestrator.study.cells import Cell, PreparedStudy
from orchestrator.study.extension import check_extension
from orchestrator.study.study import Study
from trainables.federation.trial_spec import TrialSpec

DATA = "synthetic-frozen:400,100,6,3"


SETTING = "toy / iid"


GD = {
    "name": "dp-fedgd",
    "coarse": {"learning_rate": [0.01, 0.1, 1]},
    "fine": {"learning_rate": [0.05, 0.1, 0.3, 0.5]},
}


SOFIM = {
    "name": "dp-fedsofim",
    "coarse": {"learning_rate": [0.1, 1], "rho": [0.5, 5], "beta": [0.9]},
    "fine": {"learning_rate": [0.5, 1], "rho": [1], "beta": [0.8, 0.9]},
}


def study(**changes) -> Study:
    """Two methods at one budget: 3 + 4 trials (one of them in both grids) and 4 + 4, then two seeds each. By default
    one search seed and no contest."""
    return Study.model_validate(
        {
            "name": "by-hand",
            "data": [{"source": DATA, "label": "toy"}],
            "partitions": ["iid"],
            "clients": 4,
            "methods": [GD, SOFIM],
            "defaults": "paper",
            "epsilons": [8],
            "rounds": {"coarse": 4, "fine": 4, "confirm": 6},
            "evaluate_every": 2,
            "resources": {"gpus_per_host": 0},
            **changes,
            "seeds": {"search": 42, "contest": [], "confirm": [42, 7], **changes.get("seeds", {})},
            "search": {"refine": "table", **changes.get("search", {})},
        }
    )


def cell(title: str, epsilon: float = 8) -> str:
    """A cell's name in tables."""
    return f"{SETTING} / {title} / eps {epsilon:g}"


def trial_of(cell: Cell, stage: str, configuration, seed: int | None = None) -> TrialSpec:
    """The trial of a configuration in a stage, by default with the stage's first seed."""
    seeds = {"confirm": cell.study.seeds.confirm, "contest": cell.study.seeds.contest}.get(
        stage, cell.study.seeds.search
    )
    rounds = cell.study.stage_rounds(cell.method)
    stage_rounds = rounds.coarse if stage == "coarse" else rounds.fine if stage == "fine" else rounds.confirm
    return cell.trials(configuration, [seeds[0] if seed is None else seed], stage_rounds, confirm=stage == "confirm")[0]


def near(best: float):
    """Accuracy falls by 10 with every decade of the learning rate away from the best one."""

    def evaluate(trial: TrialSpec):
        decades = abs(math.log10(trial.hyperparameters["learning_rate"] / best))
        return "done", 90 - 10 * decades, 1.0

    return evaluate


def row(trial: TrialSpec, outcome) -> Row:
    state, accuracy, loss = outcome
    return Row(
        key=trial.key,
        spec=trial.model_dump_json(),
        state=state,
        reason="",
        rounds=trial.last_round,
        accuracy=accuracy,
        loss=loss,
        metrics={} if accuracy is None else {"accuracy": {trial.last_round: accuracy}},
        epsilon_claimed=trial.privacy.epsilon,
        epsilon_local=1.0,
        epsilon_secure=1.0,
        epsilon_unsampled=0.5,
        seconds=1.0,
    )


@dataclass
class Ran:
    trials: list[TrialSpec]
    """In execution order."""
    stages: dict[StageKey, list[str]]
    study: Study
    finished: bool
    choices: dict[str, str | None]
    """The winner's key, by cell."""

    def of(self, title: str, stage: str, strategy: str = "grid", epsilon: float = 8) -> list[TrialSpec]:
        by_key = {trial.key: trial for trial in self.trials}
        name = cell_id(self.study, title, epsilon)
        return [by_key[key] for key in self.stages.get((name, strategy, stage), [])]


def drive(
    folder: Path, of: Study, evaluate, *, batch: int = 5, stop_after: int | None = None, node_of=lambda trial: "node"
) -> Ran:
    """Run the missing trials in batches; stop after `stop_after` trials, as if the driver had died. `node_of`: the name
    of the node that computes a trial."""
    trials: list[TrialSpec] = []
    with Ledger.write(folder) as ledger:
        recorded = ledger.study()
        if recorded is not None:
            check_extension(Study.model_validate_json(recorded[0]), of)
        ledger.add_study(of.model_dump_json(), "by hand")
        ledger.begin_session()
        sweep = Sweep(PreparedStudy.prepare(of), ledger)
        while not sweep.finished and (stop_after is None or len(trials) < stop_after):
            assert sweep.waiting, "not finished, and nothing to run"
            size = batch if stop_after is None else min(batch, stop_after - len(trials))
            batch_trials = list(sweep.waiting.values())[:size]
            rows = [row(trial, evaluate(trial)) for trial in batch_trials]
            ledger.add(rows, {trial.key: ([node_of(trial)], "") for trial in batch_trials})
            sweep.ended({r.key: (r.state, r.accuracy, r.loss) for r in rows})
            trials += batch_trials
        choices = {}
        if sweep.finished:
            winners = {search.name: search.winner() for search in sweep.searches}
            choices = {name: winner.key if winner else None for name, winner in winners.items()}
        return Ran(trials, ledger.stages(), of, sweep.finished, choices)
