"""Compares search strategies on dense tables (see benchmarks/replay.py).

python -m benchmarks.searches --tables FOLDER ... --into FOLDER replays what FOLDER/replays.jsonl lacks, a line for
every repetition, in several processes. benchmarks/search_page.py writes the report and the page."""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from benchmarks import page
from benchmarks.replay import FINALISTS, ROUNDS, RUNGS, Dense, Replay

REPORT = Path(__file__).resolve().parent / "reports" / "searches.csv"
FIGURE = page.DOCS / "figures" / "searches.svg"
REPETITIONS = 20
TABLES = {
    "fedgd-centred-cifar10": "dp-fedgd",
    "fedsofim-cifar10": "dp-fedsofim",
    "fedsofim3-cifar10": "dp-fedsofim",
    "fedadam4-cifar10": "dp-fedadam",
    "fedsofim3-crc5": "dp-fedsofim",
    "fedsofim3-constant-crc5": "dp-fedsofim",
    "fedavg3-crc5": "dp-fedavg",
}
"""Files and their methods."""
BUDGETS = ("searched", "contest only", "no trial")
"""What runs at a budget: search and contest, a contest of predicted configurations, or nothing."""
MEAN_BAR = 0.3
"""Mean regret, in points, of the dotted line in the figure."""
COLUMNS = 3
"""Panels in a row of the figure."""


class Plan(NamedTuple):
    """A strategy with its settings: one line of the comparison."""

    label: str
    strategy: str
    trials: int | None
    """`search.trials`: configurations, or trials for `surface`."""
    settings: dict[str, Any]

    @property
    def text(self) -> str:
        return json.dumps({"trials": self.trials, **self.settings})


SAMPLERS = {"tpe": "Optuna TPE", "cmaes": "Optuna CMA-ES", "gp": "Optuna GP"}


def plans(axes: int) -> Iterator[Plan]:
    """The plans for a table with this many axes: the grid with its default settings, and every other strategy with
    about a tenth of the grid's trials, with fewer and with more. The slowest come last."""
    for trials in (8, 16, 24) if axes == 1 else (16 * axes, 12 * axes, 8 * axes):
        yield Plan("surface", "surface", trials, {"values": 1, "extend": False})
    yield Plan("grid", "grid", None, {})
    counts = (5, 9, 16) if axes == 1 else (8 * axes // 3, 16 * axes // 3, 64)
    for configurations in counts:
        yield Plan("random", "random", configurations, {})
        yield Plan("halving", "halving", configurations, {})
    for sampler, label in SAMPLERS.items():
        for configurations in counts:
            yield Plan(label, "optuna", configurations, {"batch": 4, "sampler": sampler})


class Task(NamedTuple):
    """One repetition of a plan on a table."""

    folders: tuple[Path, ...]
    table: str
    plan: Plan
    repetition: int

    @property
    def identity(self) -> tuple[str, str, str, int]:
        return self.table, self.plan.label, self.plan.text, self.repetition


@cache
def read(folders: tuple[Path, ...], name: str) -> Dense | None:
    """The table, from the first of these folders that has it; None if none has."""
    for folder in folders:
        if (file := folder / f"dense-{name}.csv.gz").exists():
            rungs = next((f for each in folders if (f := each / f"rungs-{name}.csv.gz").exists()), None)
            return Dense.read(file, TABLES[name], rungs)
    return None


def measure(task: Task) -> dict[str, Any]:
    """Search every second budget; return the regrets at these budgets and at those between."""
    table, plan = read(task.folders, task.table), task.plan
    assert table is not None
    every, start = range(len(table.epsilons)), time.process_time()
    searched = list(every[::2])
    between = [budget for budget in every[1::2] if budget < searched[-1]]
    replay = Replay(table, plan.strategy, plan.trials, plan.settings, searched, task.repetition)
    replay.run()
    regrets = {"searched": [table.regret(b, w) for b, w in zip(searched, replay.winners(), strict=True)]}
    for kind, contest in zip(BUDGETS[1:], (True, False), strict=True):
        chosen = replay.predicted(between, contest=contest)
        regrets[kind] = [round(table.regret(b, w), 4) for b, w in zip(between, chosen, strict=True)]
    if plan.strategy == "surface":
        replay.predict_searched()
    return {
        **dict(zip(("table", "strategy", "settings", "repetition"), task.identity, strict=True)),
        "axes": len(table.axes),
        "configurations": table.means.shape[1],
        "search_rounds": replay.search_rounds,
        "contest_trials": FINALISTS * len(replay.variant.seeds("contest")),
        "regrets": regrets,
        "predictions": [[kind, *(round(value, 4) for value in values)] for kind, *values in replay.predictions],
        "cpu_s": round(time.process_time() - start, 2),
    }


def tasks(folders: tuple[Path, ...], names: Sequence[str], labels: Sequence[str], repetitions: int) -> list[Task]:
    """All repetitions; those of the quick plans first."""
    found = []
    missing = {name for name in ("optuna", "cmaes") if importlib.util.find_spec(name) is None}
    for name in TABLES:
        if (names and not any(part in name for part in names)) or (table := read(folders, name)) is None:
            continue
        for order, plan in enumerate(plans(len(table.axes))):
            lacks_rungs = plan.strategy == "halving" and not {*RUNGS} <= {*table.by_round}
            lacks_package = plan.strategy == "optuna" and missing & {"optuna", plan.settings["sampler"]}
            if not lacks_rungs and not lacks_package and (not labels or plan.label in labels):
                slow = plan.settings.get("sampler") == "gp"
                cost = (slow and (plan.trials or 0) > 40, slow, order)
                found += [(cost, Task(folders, name, plan, repetition)) for repetition in range(repetitions)]
    return [task for _, task in sorted(found, key=lambda pair: pair[0])]


def run(todo: Sequence[Task], into: Path, processes: int, seconds: float) -> None:
    """Adds a line for every repetition that the file lacks, until the time is over."""
    deadline, file = time.time() + seconds, into / "replays.jsonl"
    done = {tuple(line[name] for name in ("table", "strategy", "settings", "repetition")) for line in lines_of(file)}
    todo = [task for task in todo if task.identity not in done]
    with multiprocessing.get_context("spawn").Pool(processes) as pool, file.open("a", encoding="utf-8") as out:
        results = pool.imap_unordered(measure, todo)
        for count in range(1, len(todo) + 1):
            try:
                line = results.next(timeout=max(0.1, deadline - time.time()))
            except multiprocessing.TimeoutError:
                print(f"{len(todo) - count + 1} repetitions were not run in time", flush=True)
                break
            out.write(json.dumps(line) + "\n")
            out.flush()
            if count % 100 == 0:
                print(f"{count} of {len(todo)} repetitions", flush=True)
        pool.terminate()


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The lines of a JSON lines file, without a last line that was cut off."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


def collect(into: Path) -> pd.DataFrame:
    """The report: a line for every plan and kind of budget."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for line in lines_of(into / "replays.jsonl"):
        order = [(plan.label, plan.text) for plan in plans(line["axes"])]
        groups[list(TABLES).index(line["table"]), order.index((line["strategy"], line["settings"]))].append(line)
    rows = []
    for _, own in sorted(groups.items()):
        first = own[0]
        rounds = float(np.mean([rounds for line in own for rounds in line["search_rounds"]]))
        predictions = [prediction for line in own for prediction in line["predictions"]]
        for kind in BUDGETS:
            values = [value for line in own for value in line["regrets"][kind]]
            predicted = [p for p in predictions if (kind == "searched") == p[0] and kind != "contest only"]
            errors = np.array([score - true for _, score, _, true in predicted])
            deviations = np.array([deviation for _, _, deviation, _ in predicted])
            rows.append(
                {
                    **{name: first[name] for name in ("table", "axes", "configurations", "strategy", "settings")},
                    "search_trials": round(rounds / ROUNDS, 1),
                    "contest_trials": first["contest_trials"],
                    "trial_rounds": round(rounds + ROUNDS * first["contest_trials"]),
                    "budgets": kind,
                    "repetitions": len(own),
                    "mean": round(float(np.mean(values)), 3),
                    "p95": round(float(np.quantile(values, 0.95)), 3),
                    "worst": round(max(values), 3),
                    "prediction_error": round(float(np.abs(errors).mean()), 3) if len(errors) else None,
                    "in_band": round(float((np.abs(errors) <= 2 * deviations).mean()), 3) if len(errors) else None,
                    "cpu_s": round(sum(line["cpu_s"] for line in own), 1),
                }
            )
    return pd.DataFrame(rows)


def write_page() -> None:
    report = pd.read_csv(REPORT)
    order = {name: number for number, name in enumerate(TABLES)}
    names = sorted(report["table"].unique(), key=lambda name: order.get(name, 99))
    lines: list[str] = []
    for name in names:
        rows = report[report["table"] == name]
        first, grid = rows.iloc[0], rows[rows["strategy"] == "grid"]["search_trials"].max()
        lines += [
            "",
            f"**{name}**: {first['configurations']} configurations, {first['axes']} "
            f"ax{'is' if first['axes'] == 1 else 'es'}.",
            "",
            "| strategy | repetitions | search trials | of the grid's | trial-rounds | searched ε | "
            "other ε, contest only | other ε, no trial |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for (strategy, _), own in rows.groupby(["strategy", "settings"], sort=False):
            of = {kind: own[own["budgets"] == kind] for kind in BUDGETS}
            main = of["searched"].iloc[0]
            trials, rounds = main["search_trials"], main["trial_rounds"]
            texts = [f"{m.iloc[0]['mean']:.2f} / {m.iloc[0]['p95']:.2f}" if len(m) else "" for m in of.values()]
            lines.append(
                f"| {strategy} | {main['repetitions']} | {trials:.0f} | {trials / grid:.0%} | {rounds / 1000:.1f}k | "
                f"{' | '.join(texts)} |"
            )
    page.write("searches", [*lines, ""], page.DOCS / "benchmark.md")
    draw(report, names)


def draw(report: pd.DataFrame, names: list[str]) -> None:
    """Mean regret at the searched budgets against search trials: a panel per table."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    from orchestrator.report.palette import ON_LIGHT

    plt.rcParams["svg.hashsalt"] = "searches"
    rows = -(-len(names) // COLUMNS)
    figure, panels = plt.subplots(rows, COLUMNS, figsize=(3.6 * COLUMNS, 3 * rows), layout="constrained", squeeze=False)
    strategies = list(report["strategy"].unique())
    for panel, name in zip(panels.flat, names, strict=False):
        for number, strategy in enumerate(strategies):
            own = report[
                (report["table"] == name) & (report["strategy"] == strategy) & (report["budgets"] == "searched")
            ]
            own = own.sort_values("search_trials")
            panel.plot(own["search_trials"], own["mean"], marker="o", ms=4, label=strategy, color=ON_LIGHT[number])
        panel.axhline(MEAN_BAR, lw=0.8, ls=":", color="gray")
        panel.set(title=name, xscale="log", yscale="log", xlabel="search trials per budget")
        for axis, ticks in ((panel.xaxis, (10, 20, 50, 100, 200, 500)), (panel.yaxis, (0.01, 0.03, 0.1, 0.3, 1, 3))):
            limits = axis.get_view_interval()
            axis.set_ticks([tick for tick in ticks if limits[0] <= tick <= limits[1]])
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
    for panel in panels.flat[len(names) :]:
        panel.set_axis_off()
    for first in panels[:, 0]:
        first.set_ylabel("mean regret (points)")
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(strategies), fontsize=8
    )
    figure.savefig(FIGURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="+", type=Path, required=True, help="with dense tables and their rungs")
    parser.add_argument("--into", type=Path, required=True, help="folder of replays.jsonl")
    parser.add_argument("--only", nargs="+", default=[], help="parts of the tables' names")
    parser.add_argument("--strategies", nargs="+", default=[])
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e6)
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    options.into.mkdir(parents=True, exist_ok=True)
    todo = tasks(tuple(options.tables), options.only, options.strategies, options.repetitions)
    run(todo, options.into, options.processes, options.seconds)


if __name__ == "__main__":
    main()
