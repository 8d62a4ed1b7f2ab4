"""Successive halving against random search, in trial-rounds at equal regret: `python -m benchmarks.halving --help`.

A dense table has the accuracy of every configuration after all rounds. This computes the accuracies after the first
rounds, and replays searches on both: random subsets of the configurations are chosen on some seeds and evaluated on
the others. docs/design-notes.md has the results.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from orchestrator.execution.packing import Capacity, make_packs
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.study import Study
from search_spaces import Configuration
from trainables.federation.federation_size import FederationSize
from trainables.federation.problem import ProblemData
from trainables.federation.server import run_pack

AXES = ["learning_rate", "rho", "beta"]
SEARCH_SEEDS, EVALUATION_SEEDS = [1, 2, 3], [4, 5, 6]
ROUNDS, RUNGS, KEEP = 70, [8, 24], 1 / 3
BUDGETS = (4, 8, 16, 32, 64)
Scores = NDArray[np.float64]


def early_scores(data: str, table: pd.DataFrame, epsilon: float) -> dict[int, Scores]:
    """Mean accuracy of the table's configurations after each rung's rounds, over the search seeds."""
    study = Study.model_validate(
        {
            "name": "halving",
            "data": [data],
            "partitions": ["dirichlet:0.5"],
            "clients": 20,
            "methods": ["dp-fedsofim"],
            "epsilons": [epsilon],
            "evaluate_every": RUNGS[0],
            "seeds": {"search": SEARCH_SEEDS, "contest": [], "confirm": [42]},
        }
    )
    prepared = PreparedStudy.prepare(study)
    place: dict[str, int] = {}
    trials = []
    for index, values in enumerate(table.index):
        configuration: Configuration = dict(zip(AXES, map(float, values), strict=True))
        found = prepared.cells[0].trials(configuration, SEARCH_SEEDS, ROUNDS, RUNGS[-1])
        place |= dict.fromkeys((trial.key for trial in found), index)
        trials += found
    totals = {rung: np.zeros(len(table)) for rung in RUNGS}
    for pack in make_packs(trials, Capacity(FederationSize(1, 1.0, 0.0), 1, 128)):
        for key, lane in run_pack(pack, ProblemData.of(prepared.problems[pack[0].problem.key])).items():
            for rung in RUNGS:
                totals[rung][place[key]] += lane.metrics["accuracy"].get(rung, 0.0) / len(SEARCH_SEEDS)
    return totals


def rung_cost(restart: bool) -> float:
    """Rounds of all rungs, divided by the number of configurations in the first rung. `restart`: whether a rung trains
    from round 0 again."""
    before = [0, *RUNGS] if not restart else [0] * (len(RUNGS) + 1)
    return sum(KEEP**n * (rung - start) for n, (rung, start) in enumerate(zip([*RUNGS, ROUNDS], before, strict=True)))


def halve(scores: Mapping[int, Scores], who: NDArray[np.int64]) -> int:
    """The winner of successive halving among the configurations `who`."""
    for rung in RUNGS:
        best = np.argsort(-scores[rung][who], kind="stable")
        who = who[best[: math.ceil(len(who) * KEEP)]]
    return int(who[np.argmax(scores[ROUNDS][who])])


def replay(scores: Mapping[int, Scores], values: Scores, repetitions: int) -> dict[str, list[tuple[float, float]]]:
    """Trial-rounds per seed and mean regret at every budget, by strategy."""
    random, count = np.random.default_rng(0), len(values)
    curves: dict[str, list[tuple[float, float]]] = {"random": [], "restart": [], "continue": []}
    for budget in BUDGETS:
        for strategy, curve in curves.items():
            cost = ROUNDS if strategy == "random" else rung_cost(strategy == "restart")
            size = min(count, int(budget * ROUNDS / cost))
            chosen = []
            for _ in range(repetitions):
                who = random.permutation(count)[:size]
                chosen.append(who[np.argmax(scores[ROUNDS][who])] if strategy == "random" else halve(scores, who))
            curve.append((size * cost, float(values.max() - values[chosen].mean())))
    return curves


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True, help="dense-fedsofim3-cifar10.csv.gz")
    parser.add_argument("--data", required=True, help="cifar10-resnet20.npz")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--repetitions", type=int, default=1000)
    options = parser.parse_args(arguments)
    rows = pd.read_csv(options.table)
    rows = rows[(rows["stage"] == "coarse") & (rows["epsilon"] == options.epsilon)]
    table = rows.pivot_table(index=AXES, columns="seed", values="accuracy")
    scores = early_scores(options.data, table, options.epsilon)
    scores[ROUNDS] = table[SEARCH_SEEDS].mean(axis=1).to_numpy()
    values = table[EVALUATION_SEEDS].mean(axis=1).to_numpy()
    print(json.dumps(replay(scores, values, options.repetitions), indent=1))


if __name__ == "__main__":
    main()
