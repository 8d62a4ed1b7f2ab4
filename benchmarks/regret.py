"""How far what a search chose is from the best, in test points: `python benchmarks/regret.py --data FILE ...`.

A cell is searched again and again with other seeds, in every way and by every rule asked for, each at its own default
budget; `--warm-start` does so once more with the winners of the other budgets in the contest. What was chosen, and all
that came into a contest, is then trained with many seeds that no search saw and judged on the test rows. The regret of
a choice is how much lower its mean is than the best of all these means. That best one is itself picked among noisy
means, which makes every regret look larger rather than smaller.

Nothing of Ray is needed: packs run in this process, on the device given.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from benchmarks import page
from orchestrator.execution.packing import AUTO_LANES, Capacity, make_packs
from orchestrator.execution.sweep import Sweep
from orchestrator.results.ledger import Ledger
from orchestrator.search.cell_search import CellSearch
from orchestrator.search.contenders import Outcome
from orchestrator.study.cells import Blueprint, Cell
from orchestrator.study.settings import Study
from search_spaces import Configuration
from trainables.federation.problem import Problem, in_process
from trainables.federation.server import run_here
from trainables.federation.trial_spec import TrialSpec
from trainables.ray_actors.federation import FederationSize

REPORT = Path(__file__).resolve().parent / "reports" / "regret.json"
FIRST_JUDGE = 1_000_000  # seeds of the judges; no search has them
APART = 1_000  # between the seeds of one repetition and the next
DOCUMENTED = ("grid", "grid single", "grid warm", "random", "optuna", "halving")  # the report has all


@dataclass(frozen=True)
class Chosen:
    """What one search came to."""

    epsilon: float
    strategy: str
    configuration: Configuration
    trial_rounds: int
    """All that it took, the contest included; what two ways share counts for each."""


class Bench:
    def __init__(self, device: str, lanes: int | None) -> None:
        gpus = 1.0 if device == "cuda" else 0.0
        self.device = device
        self.size = Capacity(FederationSize(1, 1.0, gpus), 1, lanes or AUTO_LANES[device])
        self.known: dict[str, Outcome] = {}
        """What searches share is run once."""

    def run(self, trials: Iterable[TrialSpec], problems: Mapping[str, Problem]) -> dict[str, Outcome]:
        asked = {trial.key: trial for trial in trials}
        for pack in make_packs([trial for key, trial in asked.items() if key not in self.known], self.size):
            shipment = in_process(problems[pack[0].problem.key])
            for key, lane in run_here(pack, shipment, device=self.device).items():
                scores = (lane.metrics[name].get(pack[0].last_round) for name in ("accuracy", "loss"))
                accuracy, loss = scores if lane.state == "done" else (None, None)
                self.known[key] = (lane.state, accuracy, loss)
        return {key: self.known[key] for key in asked}

    def search(self, blueprint: Blueprint) -> tuple[list[Chosen], list[tuple[float, Configuration]]]:
        """What every way chose at every budget, and all that met in a contest."""
        with tempfile.TemporaryDirectory() as folder, Ledger.write(Path(folder)) as ledger:
            sweep = Sweep(blueprint, ledger)
            rounds: dict[str, int] = {}
            while not sweep.finished:
                waiting = list(sweep.waiting.values())
                rounds.update((trial.key, trial.last_round) for trial in waiting)
                search = [trial for trial in waiting if trial.problem.evaluate_on == "validation"]
                chosen = [trial for trial in waiting if trial.problem.evaluate_on == "test"]
                sweep.ended({trial.key: ("done", 0.0, 0.0) for trial in chosen})  # that is the judges' part
                sweep.ended(self.run(search, blueprint.problems))
            found = [_chosen(search, sweep, rounds) for search in sweep.searches]
            finalists = [(s.cell.epsilon, c) for s in sweep.searches for c in s.finalists(sweep.outcomes)]
        return [choice for choice in found if choice is not None], finalists

    def judge(self, cell: Cell, problems: Mapping[str, Problem], found: Sequence[Configuration]) -> list[list[float]]:
        """Test scores by seed. What diverges is worth what guessing is."""
        seeds = cell.study.seeds.confirm
        trials = [[cell.trial("confirm", configuration, seed) for seed in seeds] for configuration in found]
        outcomes = self.run([t for row in trials for t in row], problems)
        guess = 100.0 / max(problem.data.classes for problem in problems.values())
        return [[guess if (s := outcomes[t.key][1]) is None else s for t in row] for row in trials]


def _chosen(search: CellSearch, sweep: Sweep, rounds: Mapping[str, int]) -> Chosen | None:
    choice = search.choice(sweep.outcomes)
    if choice is None:
        return None
    keys = {key for stage, keys in search.stages.items() if stage != "confirm" for key in keys}
    strategy = f"{search.strategy.name} warm" if search.cell.study.search.warm_start else search.strategy.name
    taken = sum(rounds[key] for key in keys)
    return Chosen(search.cell.epsilon, strategy, search.configuration(choice.contender), taken)


def study(options: argparse.Namespace, method: str, repetition: int, *, warm: bool) -> Study:
    start = APART * repetition
    return Study.model_validate(
        {
            "name": "regret",
            "data": [options.data],
            "partitions": [options.partition],
            "clients": options.clients,
            "methods": [{"name": method, **options.space}],
            "epsilons": options.epsilons,
            "seeds": {
                "search": [start + k for k in range(1, options.search_seeds + 1)],
                "contest": [start + 100 + k for k in range(1, options.contest_seeds + 1)],
                "confirm": [FIRST_JUDGE + k for k in range(options.judges)],
            },
            "search": {
                "strategies": options.strategies,
                "select": ["contest"] if warm else options.select,
                "warm_start": warm,
                "refine": options.refine,
                "optuna": {"seed": start + 7},
                "random": {"seed": start + 7},
                "halving": {"seed": start + 7},
            },
        }
    )


def regrets(options: argparse.Namespace, method: str) -> list[dict[str, Any]]:
    """Of every way at every budget, over the repetitions."""
    bench, began = Bench(options.device, options.lanes), time.perf_counter()
    choices: list[Chosen] = []
    pools: dict[float, dict[str, Configuration]] = {epsilon: {} for epsilon in options.epsilons}
    for repetition in range(1, options.repetitions + 1):
        bench.known.clear()
        for warm in (False, True) if options.warm_start else (False,):
            blueprint = Blueprint.draw(study(options, method, repetition, warm=warm))
            found, finalists = bench.search(blueprint)
            choices += found
            for epsilon, configuration in (*finalists, *((c.epsilon, c.configuration) for c in found)):
                pools[epsilon].setdefault(_name(configuration), configuration)
        spent, judged = time.perf_counter() - began, sum(map(len, pools.values()))
        print(f"{method}: repetition {repetition}, {judged} judged, {spent:.0f} s", file=sys.stderr)
        if options.seconds and spent > options.seconds:
            break
    return [
        _cell(bench, options, cell, blueprint, repetition, choices, pools[cell.epsilon]) for cell in blueprint.cells
    ]


def _cell(
    bench: Bench,
    options: argparse.Namespace,
    cell: Cell,
    blueprint: Blueprint,
    repetitions: int,
    choices: Sequence[Chosen],
    pool: Mapping[str, Configuration],
) -> dict[str, Any]:
    scores = bench.judge(cell, blueprint.problems, list(pool.values()))
    means = dict(zip(pool, map(fmean, scores), strict=True))
    best = max(means, key=means.__getitem__)
    by_option: dict[str, list[Chosen]] = defaultdict(list)
    for choice in choices:
        if choice.epsilon == cell.epsilon:
            by_option[choice.strategy].append(choice)
    return {
        "data": Path(options.data).stem if options.data.endswith(".npz") else options.data,
        "method": cell.method.name,
        "epsilon": cell.epsilon,
        "repetitions": repetitions,
        "judges": options.judges,
        "judged": len(pool),
        "best": {"configuration": pool[best], "mean": means[best], "std": stdev(scores[list(pool).index(best)])},
        "strategies": {
            strategy: _summary([means[best] - means[_name(c.configuration)] for c in found], found)
            for strategy, found in by_option.items()
        },
    }


def _summary(lost: list[float], found: list[Chosen]) -> dict[str, float]:
    return {
        "mean": fmean(lost),
        "p95": float(np.percentile(lost, 95)),
        "worst": max(lost),
        "trial_rounds": fmean(choice.trial_rounds for choice in found),
    }


def _name(configuration: Configuration) -> str:
    return json.dumps(configuration, sort_keys=True)


def table(cells: Sequence[dict[str, Any]], strategies: Sequence[str] = ()) -> list[str]:
    """Markdown: cells by ways (these, or all), mean / 95th percentile of the regret (thousands of trial-rounds)."""
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", nargs="+", type=Path, help="only put what --json wrote into docs/studies.md")
    parser.add_argument("--data", default="synthetic-frozen", help="a feature file or a built-in set")
    parser.add_argument("--methods", nargs="+", default=["dp-fedgd", "dp-fedsofim"])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 10.0])
    parser.add_argument("--strategies", nargs="+", default=["grid"], help="grid, optuna, random, halving")
    parser.add_argument("--warm-start", action="store_true", help="also with the winners of the budgets beside")
    parser.add_argument("--select", nargs="+", default=["contest", "single"])
    parser.add_argument("--refine", default="zoom")
    parser.add_argument("--space", type=json.loads, default={}, help="JSON: fixed, coarse, fine of every method")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--seconds", type=float, help="begin no further repetition of a method after so long")
    parser.add_argument("--search-seeds", type=int, default=3)
    parser.add_argument("--contest-seeds", type=int, default=5)
    parser.add_argument("--judges", type=int, default=20, help="seeds on which configurations are judged")
    parser.add_argument("--partition", default="dirichlet:0.5")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--lanes", type=int, help="in a pack; default: as a sweep has them")
    parser.add_argument("--json", type=Path, help="write all numbers there, cell by cell")
    options = parser.parse_args(arguments)
    if options.collect:
        found = [cell for file in options.collect for cell in json.loads(file.read_text(encoding="utf-8"))]
        REPORT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        page.write("regret", table(found, DOCUMENTED), page.DOCS / "studies.md")
        return
    cells: list[dict[str, Any]] = []
    for method in options.methods:
        cells += regrets(options, method)
        if options.json:
            options.json.write_text(json.dumps(cells, indent=1), encoding="utf-8")
    print("\n".join(table(cells)))


if __name__ == "__main__":
    main()
