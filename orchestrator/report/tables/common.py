"""What several tables say in the same words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from orchestrator.report.tables.render import Bold
from orchestrator.results.winners import CellResult, Results, Score
from orchestrator.study.objective import Objective

NAMES = ("setting", "epsilon", "method", "search")
"""The columns that say which cell a line of a CSV file is about."""

LOST = ("diverged", "failed")
"""How a trial can end before its last round."""


def names(cell: CellResult) -> dict[str, str | float]:
    values = (cell.setting, cell.epsilon, cell.method.shown, cell.strategy)
    return dict(zip(NAMES, values, strict=True))


def name_columns(results: Results) -> list[str]:
    """The way of searching is named only where there is more than one."""
    return ["Method", "Search"] if results.several_strategies else ["Method"]


def named_rows(results: Results, cells: Sequence[CellResult], rows: Iterable[Sequence[str]]) -> list[list[str]]:
    return [
        [cell.method.shown, *([cell.strategy] if results.several_strategies else []), *row]
        for cell, row in zip(cells, rows, strict=True)
    ]


def short_name(cell: CellResult, results: Results) -> str:
    """A cell within its setting, for notes."""
    strategy = f" ({cell.strategy})" if results.several_strategies else ""
    return f"{cell.method.shown}{strategy} at {budget(cell.epsilon)}"


def budget(epsilon: float) -> str:
    return "ε = ∞" if math.isinf(epsilon) else f"ε = {epsilon:g}"


def mean_and_std(score: Score, objective: Objective) -> str:
    mean = objective.shown(score.mean)
    return mean if math.isnan(score.std) else f"{mean} ± {objective.shown(score.std)}"


def spread(results: Results) -> str:
    """What stands on either side of ±."""
    seeds = results.study.seeds.confirm
    if results.study.private:
        return "the one run that is published, with secret noise"
    if len(seeds) == 1:
        return f"a single seed ({seeds[0]})"
    dealt = results.study.seeds.partition
    over = "" if isinstance(dealt, int) else ", each with a partition of its own"
    if isinstance(dealt, list):
        over = f", over {min(len(dealt), len(seeds))} partitions"
    shown = ", ".join(map(str, seeds))
    return f"mean ± sample standard deviation (ddof = 1) over {len(seeds)} seeds ({shown}){over}"


def bold_best(texts: Sequence[str], values: Sequence[float | None], objective: Objective) -> list[str]:
    """The best of the values that are there, and all that print the same."""
    rounded = [None if value is None else float(objective.shown(value)) for value in values]
    there = [value for value in rounded if value is not None]
    if len(there) < 2:
        return list(texts)
    best = min(there, key=objective.cost)
    return [Bold(text) if value == best else text for text, value in zip(texts, rounded, strict=True)]


def unfinished(cells: Iterable[CellResult]) -> list[str]:
    """A sentence, if there is something left to run."""
    left = [cell for cell in cells if cell.missing]
    count = sum(cell.missing for cell in left)
    if not count:
        return []
    least = "at least " if any(cell.more_to_come for cell in left) else ""
    return [f"The study is unfinished: {least}{count} {'trial is' if count == 1 else 'trials are'} missing."]
