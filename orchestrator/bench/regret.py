"""The regret of search strategies: how far their choices are from the best configuration, in points of test accuracy.

Every cell is searched repeatedly with different seeds and validation rows, by each strategy and selection rule, each
with its default number of configurations. With `warm_start` it is searched once more, and the best configurations of
neighbouring eps join its contest. All choices and all finalists are then trained with many seeds that no search used,
and evaluated on the test rows. The regret of a choice is the difference between its mean and the best of all means. The
best mean is itself a maximum over noisy means, so regrets are overestimated rather than underestimated.

Packs run in this process, without Ray.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator.execution.cell_search import CellSearch
from orchestrator.execution.packing import AUTO_LANES, Capacity, make_packs
from orchestrator.execution.sweep import Sweep
from orchestrator.results.ledger import Ledger
from orchestrator.search.candidates import Outcome
from orchestrator.study.cells import Cell, PreparedStudy
from orchestrator.study.study import Study
from search_spaces import Configuration
from trainables.federation.federation_size import FederationSize
from trainables.federation.problem import Problem, ProblemData
from trainables.federation.server import run_pack
from trainables.federation.trial_spec import TrialSpec

FIRST_EVALUATION_SEED = 1_000_000  # no search uses seeds from here on
SEEDS_PER_REPETITION = 1_000


@dataclass(frozen=True, kw_only=True)
class RegretOptions:
    data: str = "synthetic-frozen"
    methods: Sequence[str] = ("dp-fedgd", "dp-fedsofim")
    epsilons: Sequence[float] = (1.0, 10.0)
    strategies: Sequence[str] = ("grid",)
    warm_start: bool = False
    select: Sequence[str] = ("contest", "single")
    refine: str = "zoom"
    space: Mapping[str, Any] = field(default_factory=dict)
    """`fixed`, `coarse` and `fine`, as in a study; the same for every method."""
    repetitions: int = 20
    seconds: float | None = None
    """Start no further repetition of a method after this time."""
    search_seeds: int = 3
    contest_seeds: int = 5
    evaluation_seeds: int = 20
    partition: str = "dirichlet:0.5"
    clients: int = 20
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True)
class Choice:
    """The configuration that one search chose, and the cost of the search."""

    repetition: int
    epsilon: float
    strategy: str
    configuration: Configuration
    trial_rounds: int
    """Rounds of all trials, including the contest. Trials that two strategies share count for both."""


class Evaluated(NamedTuple):
    """The test accuracies of a configuration, trained with the evaluation seeds."""

    scores: list[float]
    """By seed."""
    by_row: NDArray[np.float64]
    """By test row: the share of seeds that classify it correctly, in percent."""


class Runner:
    """Runs trials and searches in this process. Trials that several searches share run once."""

    def __init__(self, device: str) -> None:
        gpus = 1.0 if device == "cuda" else 0.0
        self.device = device
        self.size = Capacity(FederationSize(1, 1.0, gpus), 1, AUTO_LANES[device])
        self.outcomes: dict[str, Outcome] = {}
        self.correct: dict[str, bytes] = {}
        """Which test rows a trial classifies correctly, as packed bits."""

    def run(self, trials: Iterable[TrialSpec], problems: Mapping[str, Problem]) -> dict[str, Outcome]:
        by_key = {trial.key: trial for trial in trials}
        for pack in make_packs([trial for key, trial in by_key.items() if key not in self.outcomes], self.size):
            data = ProblemData.of(problems[pack[0].problem.key])
            for key, lane in run_pack(pack, data, device=self.device).items():
                scores = (lane.metrics[name].get(pack[0].last_round) for name in ("accuracy", "loss"))
                accuracy, loss = scores if lane.state == "done" else (None, None)
                self.outcomes[key] = (lane.state, accuracy, loss)
                if lane.correct and lane.state == "done":
                    self.correct[key] = lane.correct
        return {key: self.outcomes[key] for key in by_key}

    def search(
        self, prepared: PreparedStudy, repetition: int
    ) -> tuple[list[Choice], list[tuple[float, Configuration]]]:
        """The choice of every search variant at every eps, if it has a winner, and all finalists with their eps."""
        with tempfile.TemporaryDirectory() as folder, Ledger.write(Path(folder)) as ledger:
            sweep = Sweep(prepared, ledger)
            trials: dict[str, TrialSpec] = {}
            while not sweep.finished:
                waiting = list(sweep.waiting.values())
                trials.update((trial.key, trial) for trial in waiting)
                search = [trial for trial in waiting if trial.problem.evaluate_on == "validation"]
                confirm = [trial for trial in waiting if trial.problem.evaluate_on == "test"]
                sweep.ended({trial.key: ("done", 0.0, 0.0) for trial in confirm})  # `evaluated` runs them
                sweep.ended(self.run(search, prepared.problems))
            choices = [_choice(repetition, search, trials) for search in sweep.searches]
            finalists = [(s.cell.epsilon, c) for s in sweep.searches for c in s.finalists()]
        return [choice for choice in choices if choice is not None], finalists

    def evaluate(
        self,
        cell: Cell,
        problems: Mapping[str, Problem],
        configurations: Sequence[Configuration],
        *,
        confirm: bool = True,
    ) -> list[list[float]]:
        """Accuracies by configuration and confirm seed. `confirm`: train and evaluate as in the confirm stage, else
        as in a search. A diverged trial scores as random guessing."""
        return self._scores(_trials(cell, configurations, confirm=confirm), problems)

    def evaluated(
        self, cell: Cell, problems: Mapping[str, Problem], configurations: Sequence[Configuration]
    ) -> list[Evaluated]:
        """The configurations, trained as in the confirm stage and evaluated on the test rows."""
        trials = _trials(cell, configurations, confirm=True)
        scores = self._scores(trials, problems)
        by_row = [np.mean([self._by_row(trial, problems) for trial in by_seed], axis=0) for by_seed in trials]
        return list(map(Evaluated, scores, by_row))

    def _scores(self, trials: Sequence[Sequence[TrialSpec]], problems: Mapping[str, Problem]) -> list[list[float]]:
        outcomes, guess = self.run([t for by_seed in trials for t in by_seed], problems), _guess(problems)
        return [[guess if (s := outcomes[t.key][1]) is None else s for t in by_seed] for by_seed in trials]

    def _by_row(self, trial: TrialSpec, problems: Mapping[str, Problem]) -> NDArray[np.float64]:
        rows = len(problems[trial.problem.key].data.y_test)
        if trial.key not in self.correct:
            return np.full(rows, _guess(problems))
        bits = np.unpackbits(np.frombuffer(self.correct[trial.key], np.uint8), count=rows)
        return bits.astype(np.float64) * 100


def _trials(cell: Cell, configurations: Sequence[Configuration], *, confirm: bool) -> list[list[TrialSpec]]:
    """The trials, by configuration and confirm seed."""
    seeds, rounds = cell.study.seeds.confirm, cell.study.stage_rounds(cell.method).confirm
    return [cell.trials(configuration, seeds, rounds, confirm=confirm) for configuration in configurations]


def _guess(problems: Mapping[str, Problem]) -> float:
    """Accuracy of random guessing, in percent."""
    return 100.0 / max(problem.data.classes for problem in problems.values())


def _choice(repetition: int, search: CellSearch, trials: Mapping[str, TrialSpec]) -> Choice | None:
    winner = search.winner()
    if winner is None:
        return None
    keys = {key for stage, keys in search.stages.items() if stage != "confirm" for key in keys}
    strategy = f"{search.variant.name} warm" if search.cell.study.search.warm_start else search.variant.name
    rounds: dict[str, int] = {}
    for trial in (trials[key] for key in keys):  # a trial of a later rung continues an earlier one: count the longest
        rounds[trial.full_key] = max(trial.last_round, rounds.get(trial.full_key, 0))
    configuration = search.history.configuration(winner.candidate)
    return Choice(repetition, search.cell.epsilon, strategy, configuration, sum(rounds.values()))


def _study(options: RegretOptions, method: str, repetition: int, *, warm: bool) -> Study:
    start = SEEDS_PER_REPETITION * repetition
    return Study.model_validate(
        {
            "name": "regret",
            "data": [options.data],
            "partitions": [options.partition],
            "clients": options.clients,
            "methods": [{"name": method, **options.space}],
            "defaults": "paper",
            "epsilons": list(options.epsilons),
            "validation": {"seed": repetition},
            "seeds": {
                "search": [start + k for k in range(1, options.search_seeds + 1)],
                "contest": [start + 100 + k for k in range(1, options.contest_seeds + 1)],
                "confirm": [FIRST_EVALUATION_SEED + k for k in range(options.evaluation_seeds)],
            },
            "search": {
                "strategies": list(options.strategies),
                "select": ["contest"] if warm else list(options.select),
                "warm_start": warm,
                "refine": options.refine,
                "optuna": {"seed": start + 7},
                "random": {"seed": start + 7},
                "halving": {"seed": start + 7},
                "surface": {"seed": start + 7},
            },
        }
    )


def regrets(options: RegretOptions, method: str) -> list[dict[str, Any]]:
    """The regrets of all strategies at every budget, over the repetitions: one entry per cell."""
    runner, start = Runner(options.device), time.perf_counter()
    choices: list[Choice] = []
    pools: dict[float, dict[str, Configuration]] = {epsilon: {} for epsilon in options.epsilons}
    for repetition in range(1, options.repetitions + 1):
        runner.outcomes.clear()
        for warm in (False, True) if options.warm_start else (False,):
            prepared = PreparedStudy.prepare(_study(options, method, repetition, warm=warm))
            chosen, finalists = runner.search(prepared, repetition)
            choices += chosen
            for epsilon, configuration in (*finalists, *((c.epsilon, c.configuration) for c in chosen)):
                pools[epsilon].setdefault(_key(configuration), configuration)
        seconds, configurations = time.perf_counter() - start, sum(map(len, pools.values()))
        print(
            f"{method}: repetition {repetition}, {configurations} configurations to evaluate, {seconds:.0f} s",
            file=sys.stderr,
        )
        if options.seconds and seconds > options.seconds:
            break
    return [
        _cell_regrets(runner, options, cell, prepared, repetition, choices, pools[cell.epsilon])
        for cell in prepared.cells
        if pools[cell.epsilon]
    ]


def _cell_regrets(
    runner: Runner,
    options: RegretOptions,
    cell: Cell,
    prepared: PreparedStudy,
    repetitions: int,
    choices: Sequence[Choice],
    pool: Mapping[str, Configuration],
) -> dict[str, Any]:
    evaluated = dict(zip(pool, runner.evaluated(cell, prepared.problems, list(pool.values())), strict=True))
    means = {key: fmean(own.scores) for key, own in evaluated.items()}
    best = max(means, key=means.__getitem__)
    by_strategy: dict[str, list[Choice]] = defaultdict(list)
    for choice in choices:
        if choice.epsilon == cell.epsilon:
            by_strategy[choice.strategy].append(choice)
    chosen = {
        name: {choice.repetition: evaluated[_key(choice.configuration)] for choice in own}
        for name, own in by_strategy.items()
    }
    reference = prepared.study.variants[0].name
    of_reference = chosen.get(reference, {})
    return {
        "data": Path(options.data).stem if options.data.endswith(".npz") else options.data,
        "method": cell.method.name,
        "epsilon": cell.epsilon,
        "repetitions": repetitions,
        "evaluation_seeds": options.evaluation_seeds,
        "evaluated": len(pool),
        "best": {"configuration": pool[best], "mean": means[best], "std": stdev(evaluated[best].scores)},
        "strategies": {
            name: {
                **_summary([means[best] - means[_key(c.configuration)] for c in own], own),
                **(
                    {f"against {reference}": difference(of_reference, chosen[name])}
                    if name != reference and of_reference.keys() & chosen[name].keys()
                    else {}
                ),
            }
            for name, own in by_strategy.items()
        },
    }


def difference(reference: Mapping[int, Evaluated], ours: Mapping[int, Evaluated]) -> dict[str, float]:
    """The mean regret of `ours` minus that of `reference`, over the repetitions in which both have a winner, and its
    standard error. The error combines those over repetitions, each with its own search seeds and validation rows, over
    evaluation seeds and over test rows, all of which are drawn at random."""
    pairs = [(reference[number], ours[number]) for number in sorted(reference.keys() & ours.keys())]
    by_repetition = [fmean(theirs.scores) - fmean(own.scores) for theirs, own in pairs]
    by_seed = np.mean([np.subtract(theirs.scores, own.scores) for theirs, own in pairs], axis=0)
    by_row = np.mean([theirs.by_row - own.by_row for theirs, own in pairs], axis=0)
    drawn = {"repetitions": by_repetition, "seeds": by_seed, "rows": by_row}
    errors = {n: float(np.std(v, ddof=1)) / math.sqrt(len(v)) if len(v) > 1 else 0.0 for n, v in drawn.items()}
    return {"mean": fmean(by_repetition), "error": math.hypot(*errors.values()), **errors}


def _summary(losses: list[float], choices: list[Choice]) -> dict[str, Any]:
    return {
        "mean": fmean(losses),
        "error": stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None,
        "losses": [round(loss, 4) for loss in losses],
        "p95": float(np.percentile(losses, 95)),
        "worst": max(losses),
        "trial_rounds": fmean(choice.trial_rounds for choice in choices),
    }


def _key(configuration: Configuration) -> str:
    return json.dumps(configuration, sort_keys=True)


def table(cells: Sequence[dict[str, Any]], strategies: Sequence[str] = ()) -> list[str]:
    """A Markdown table, cells by strategies (default: all): mean / 95th percentile of the regret (thousands of
    trial-rounds)."""
    strategies = strategies or list(dict.fromkeys(strategy for cell in cells for strategy in cell["strategies"]))
    lines = [
        f"| data, method, ε | repetitions | best mean | {' | '.join(strategies)} |",
        "|---|---:|---:|" + "---:|" * len(strategies),
    ]
    for cell in cells:
        texts = []
        for strategy in strategies:
            f = cell["strategies"].get(strategy)
            texts.append(f"{f['mean']:.2f} / {f['p95']:.2f} ({f['trial_rounds'] / 1000:.1f}k)" if f else "")
        name = f"{cell['data']}, {cell['method']}, {cell['epsilon']:g}"
        lines.append(f"| {name} | {cell['repetitions']} | {cell['best']['mean']:.2f} | {' | '.join(texts)} |")
    return lines
