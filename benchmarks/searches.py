"""Compares search strategies on dense tables (see benchmarks/replay.py).

python -m benchmarks.searches FOLDER runs what benchmarks/reports/searches.csv lacks. --page writes docs/benchmark.md
and its figure from that file."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from benchmarks import page
from benchmarks.replay import FINALISTS, ROUNDS, Dense, Replay
from orchestrator.search.strategies import STRATEGIES

REPORT = Path(__file__).resolve().parent / "reports" / "searches.csv"
FIGURE = page.DOCS / "figures" / "searches.svg"
REPETITIONS = 20
TABLES = {
    "dense-fedgd-centred-cifar10": "dp-fedgd",
    "dense-fedsofim-cifar10": "dp-fedsofim",
    "dense-fedsofim3-cifar10": "dp-fedsofim",
    "dense-fedadam4-cifar10": "dp-fedadam",
    "dense-fedsofim3-crc5": "dp-fedsofim",
}
"""Files and their methods."""
BUDGETS = ("searched", "contest only", "no trial")
"""What runs at a budget: search and contest, a contest of predicted configurations, or nothing."""
MEAN_BAR, P95_BAR = 0.3, 0.8


class Plan(NamedTuple):
    """One line of the comparison."""

    label: str
    strategy: str
    trials: int | None
    """`search.trials`: configurations, or trials for `surface`."""
    settings: dict[str, Any]


def plans(axes: int) -> Iterator[Plan]:
    """What is compared on a table with so many axes: the grid's default, and every other strategy with about a tenth of
    its trials, fewer and more."""
    yield Plan("grid", "grid", None, {})
    for trials in (8, 16, 24) if axes == 1 else (8 * axes, 12 * axes, 16 * axes):
        yield Plan("surface", "surface", trials, {"values": 1})
    samplers = STRATEGIES["optuna"].Settings.model_fields.get("sampler")
    for configurations in (5, 9, 16) if axes == 1 else (8 * axes // 3, 16 * axes // 3, 64):
        yield Plan("random", "random", configurations, {})
        for sampler, label in (("tpe", "Optuna TPE"), ("gp", "Optuna GP"), ("cmaes", "Optuna CMA-ES")):
            if samplers is None and sampler != "tpe":
                continue
            if sampler == "gp" and configurations > 40:
                continue  # hours
            chosen = {} if samplers is None else {"sampler": sampler}
            yield Plan(label, "optuna", configurations, {"batch": 4, **chosen})


def measure(table: Dense, plan: Plan, repetitions: int) -> list[dict[str, Any]]:
    """Regrets at every second budget, which are searched, and at those between."""
    every = range(len(table.epsilons))
    searched, between = list(every[::2]), list(every[1::2])
    between = [budget for budget in between if budget < searched[-1]]
    start, trials, errors = time.process_time(), [], []
    regrets: dict[str, list[float]] = {kind: [] for kind in BUDGETS}
    for repetition in range(repetitions):
        replay = Replay(table, plan.strategy, plan.trials, plan.settings, searched, repetition)
        replay.run()
        regrets["searched"] += [table.regret(b, w) for b, w in zip(searched, replay.winners(), strict=True)]
        for kind, contest in zip(BUDGETS[1:], (True, False), strict=True):
            chosen = replay.predicted(between, contest=contest)
            regrets[kind] += [table.regret(b, w) for b, w in zip(between, chosen, strict=True)]
        trials += replay.search_trials
        errors += replay.errors
    seconds = time.process_time() - start
    contest = FINALISTS * len(replay.variant.seeds("contest"))
    return [
        {
            "table": table.name,
            "axes": len(table.axes),
            "configurations": table.means.shape[1],
            "strategy": plan.label,
            "settings": json.dumps({"trials": plan.trials, **plan.settings}),
            "search_trials": round(float(np.mean(trials)), 1),
            "contest_trials": contest,
            "trial_rounds": round(ROUNDS * (float(np.mean(trials)) + contest)),
            "budgets": kind,
            "repetitions": repetitions,
            "mean": round(float(np.mean(values)), 3),
            "p95": round(float(np.quantile(values, 0.95)), 3),
            "worst": round(max(values), 3),
            "prediction_error": round(float(np.mean(np.abs(errors))), 3) if errors and kind == "no trial" else None,
            "cpu_s": round(seconds, 1),
        }
        for kind, values in regrets.items()
    ]


def run(folder: Path, names: list[str], labels: list[str], report: Path) -> None:
    for name, method in TABLES.items():
        file = folder / f"{name}.csv.gz"
        if not file.exists() or (names and not any(part in name for part in names)):
            continue
        table = Dense.read(file, method)
        for plan in plans(len(table.axes)):
            done = pd.read_csv(report) if report.exists() else pd.DataFrame(columns=["table", "strategy", "settings"])
            settings = json.dumps({"trials": plan.trials, **plan.settings})
            known = (done["table"] == table.name) & (done["strategy"] == plan.label) & (done["settings"] == settings)
            if known.any() or (labels and plan.label not in labels):
                continue
            lines = pd.DataFrame(measure(table, plan, REPETITIONS))
            lines.to_csv(report, mode="a", header=not report.exists(), index=False)
            shown = ["table", "strategy", "settings", "search_trials", "budgets", "mean", "p95", "cpu_s"]
            print(lines[shown].to_string(index=False, header=False), flush=True)


def write_page() -> None:
    report = pd.read_csv(REPORT)
    order = {name.removeprefix("dense-"): number for number, name in enumerate(TABLES)}
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
            of = {kind: own[own["budgets"] == kind].iloc[0] for kind in BUDGETS}
            main = of["searched"]
            trials, rounds = main["search_trials"], main["trial_rounds"]
            texts = [f"{of[kind]['mean']:.2f} / {of[kind]['p95']:.2f}" for kind in of]
            lines.append(
                f"| {strategy} | {main['repetitions']} | {trials:.0f} | {trials / grid:.0%} | {rounds / 1000:.1f}k | "
                f"{' | '.join(texts)} |"
            )
    page.write("searches", [*lines, ""], page.DOCS / "benchmark.md")
    draw(report, names)


def draw(report: pd.DataFrame, names: list[str]) -> None:
    """Mean regret at the searched budgets against search trials: a panel per table."""
    import matplotlib.pyplot as plt

    from orchestrator.report.palette import ON_LIGHT

    plt.rcParams["svg.hashsalt"] = "searches"
    figure, panels = plt.subplots(1, len(names), figsize=(3.2 * len(names), 3.2), layout="constrained", squeeze=False)
    strategies = list(report["strategy"].unique())
    for panel, name in zip(panels[0], names, strict=True):
        for number, strategy in enumerate(strategies):
            own = report[
                (report["table"] == name) & (report["strategy"] == strategy) & (report["budgets"] == "searched")
            ]
            own = own.sort_values("search_trials")
            panel.plot(own["search_trials"], own["mean"], marker="o", ms=4, label=strategy, color=ON_LIGHT[number])
        panel.axhline(MEAN_BAR, lw=0.8, ls=":", color="gray")
        panel.set(title=name, xscale="log", yscale="log", xlabel="search trials per budget")
    panels[0][0].set_ylabel("mean regret (points)")
    panels[0][-1].legend(fontsize=7)
    figure.savefig(FIGURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="folder with the dense tables")
    parser.add_argument("--tables", nargs="+", default=[], help="parts of their names")
    parser.add_argument("--strategies", nargs="+", default=[])
    parser.add_argument("--report", type=Path, default=REPORT, help="file to add results to")
    parser.add_argument("--page", action="store_true", help="write docs/benchmark.md and its figure")
    options = parser.parse_args()
    if options.folder:
        run(options.folder, options.tables, options.strategies, options.report)
    if options.page:
        write_page()


if __name__ == "__main__":
    main()
