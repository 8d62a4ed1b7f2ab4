"""Rules for budgets that were not searched, compared on dense tables: python -m benchmarks.between FOLDER ...

A rule chooses a configuration between two searched budgets, without a trial there. `straight` is the line between the
scores at the neighbouring budgets, `curve` interpolates over all of them, and `process` asks the Gaussian process.
`straight - d` subtracts a standard deviation, with a part that is d times the difference of the neighbours' scores.
`lower neighbour` is the lower of the two scores, `lower - 1` the same with a standard deviation subtracted from each,
and `cautious` the rule of the product.
docs/design-notes.md has the results."""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.interpolate import PchipInterpolator

from benchmarks.replay import Replay
from benchmarks.searches import TABLES, read
from orchestrator.search.surface.batches import highest

DOUBTS = (0.1, 0.2)
SETTINGS = {"values": 1, "extend": False}


def choices(replay: Replay, budget: int) -> dict[str, int]:
    """The index of the chosen configuration, by rule."""
    points, noise = replay.table.lattice.points, replay.noise(budget)
    where = np.array([replay.noise(own) for own in replay.budgets])
    known = [replay.surface.scores(points, at, number) for number, at in enumerate(where)]
    order = np.argsort(where)
    scores = np.array([known[number][0] for number in order])
    found = {
        "process": replay.surface.scores(points, noise)[0],
        "curve": PchipInterpolator(where[order], scores, axis=0)(noise),
    }
    above = int(np.searchsorted(where[order], noise))
    share = (noise - where[order][above - 1]) / (where[order][above] - where[order][above - 1])
    (low, low_deviation), (high, high_deviation) = known[order[above - 1]], known[order[above]]
    straight, deviation = (1 - share) * low + share * high, (1 - share) * low_deviation + share * high_deviation
    found["straight"] = straight
    for doubt in DOUBTS:
        found[f"straight - {doubt:g}"] = straight - np.hypot(
            deviation, 2 * min(share, 1 - share) * doubt * (low - high)
        )
    found["lower neighbour"] = np.minimum(low, high)
    found["lower - 1"] = np.minimum(low - low_deviation, high - high_deviation)
    found["cautious"] = replay.expected(budget).cautious
    return {rule: highest(values, 1)[0] for rule, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="with dense tables")
    parser.add_argument("--only", nargs="+", default=list(TABLES))
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args()
    for name in options.only:
        table = read(tuple(options.folders), name)
        if table is None:
            continue
        regrets = defaultdict(list)
        searched = list(range(0, len(table.epsilons), 2))
        for repetition in range(options.repetitions):
            for trials in (12, 16):
                replay = Replay(table, "surface", trials * len(table.axes), SETTINGS, searched, repetition)
                replay.run()
                for budget in range(1, searched[-1], 2):
                    for rule, index in choices(replay, budget).items():
                        regrets[trials, rule].append(table.regret(budget, index))
        lines = [
            {"table": name, "trials per axis": trials, "rule": rule, "mean": np.mean(v), "p95": np.quantile(v, 0.95)}
            for (trials, rule), v in sorted(regrets.items())
        ]
        print(pd.DataFrame(lines).round(3).to_string(index=False, header=False), flush=True)


if __name__ == "__main__":
    main()
