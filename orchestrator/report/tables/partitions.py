"""How much of the spread between runs comes from who holds which rows, and how much from the noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import pandas as pd

from orchestrator.report.tables.common import NAMES, budget, name_columns, named_rows, names, unfinished
from orchestrator.report.tables.render import NOTHING, Group, Table
from orchestrator.results.winners import CellResult, Results


@dataclass(frozen=True)
class Split:
    """Standard deviations: of all runs, between partitions, and between runs of one partition."""

    total: float
    partition: float
    noise: float


def split(by_partition: Mapping[int, Sequence[float]]) -> Split | None:
    """By the analysis of variance of one random factor, for groups of any sizes; None where no partition has two runs,
    or there is only one."""
    groups = [list(values) for values in by_partition.values()]
    everything = [value for group in groups for value in group]
    n, k = len(everything), len(groups)
    if k < 2 or n == k:
        return None
    mean = fmean(everything)
    within = sum((value - fmean(group)) ** 2 for group in groups for value in group) / (n - k)
    between = sum(len(group) * (fmean(group) - mean) ** 2 for group in groups) / (k - 1)
    size = (n - sum(len(group) ** 2 for group in groups) / n) / (k - 1)
    return Split(stdev(everything), math.sqrt(max(0.0, (between - within) / size)), math.sqrt(within))


def partitions(results: Results, setting: str) -> Table | None:
    """None where all runs share one partition, or only one is shown."""
    if isinstance(results.study.seeds.partition, int) or results.study.private:
        return None
    objective, cells = results.study.judged_by, results.of(setting)
    found = {id(cell): split(_by_partition(cell)) for cell in cells}
    groups = [
        Group(budget(epsilon), named_rows(results, mine, [_row(cell, found[id(cell)]) for cell in mine]))
        for epsilon in results.study.epsilons
        if (mine := results.of(setting, epsilon))
    ]
    caption = (
        f"Sample standard deviation of the {objective.final.lower()}{objective.unit} after the last round, of all "
        "confirm runs, and what of it comes from the partition of the rows over the clients and what from the noise "
        "(analysis of variance with the partition as a random factor)."
    )
    if not any(found.values()):
        caption += " They can be told apart only where some partition has several runs, and here none has."
    return Table(
        title=f"Spread by partition and noise: {setting}",
        summary="How much of the spread between runs is due to who holds which rows.",
        caption=" ".join([caption, *unfinished(cells)]),
        columns=[*name_columns(results), "Partitions", "Runs", "All", "Partition", "Noise"],
        align="l" * len(name_columns(results)) + "rrrrr",
        groups=groups,
        data=pd.DataFrame(
            [_record(cell, found[id(cell)]) for cell in cells],
            columns=[*NAMES, "partitions", "runs", "total_std", "partition_std", "noise_std"],
        ),
    )


def _by_partition(cell: CellResult) -> dict[int, list[float]]:
    """Final scores, by the seed of the partition."""
    found: dict[int, list[float]] = {}
    for seed, score in cell.scores_at(cell.last).items():
        found.setdefault(cell.confirm[seed].trial.problem.partition.seed, []).append(score)
    return found


def _row(cell: CellResult, parts: Split | None) -> list[str]:
    by_partition, shown = _by_partition(cell), cell.objective.shown
    scores = [score for group in by_partition.values() for score in group]
    total = shown(stdev(scores)) if len(scores) > 1 else NOTHING
    split_up = [shown(parts.partition), shown(parts.noise)] if parts else [NOTHING] * 2
    return [str(len(by_partition)), str(len(scores)), total, *split_up]


def _record(cell: CellResult, parts: Split | None) -> dict[str, object]:
    by_partition = _by_partition(cell)
    scores = [score for group in by_partition.values() for score in group]
    return {
        **names(cell),
        "partitions": len(by_partition),
        "runs": len(scores),
        "total_std": stdev(scores) if len(scores) > 1 else None,
        "partition_std": parts.partition if parts else None,
        "noise_std": parts.noise if parts else None,
    }
