"""How much of the standard deviation between runs is due to the partition, and how much to the noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import pandas as pd

from orchestrator.report.tables.common import budget, cell_table, unfinished
from orchestrator.report.tables.render import NOTHING, Table
from orchestrator.results.frames import NAMES, names
from orchestrator.results.winners import CellResult, Results


@dataclass(frozen=True)
class Split:
    """Standard deviations over all runs, between partitions, and between runs that share a partition."""

    total: float
    partition: float
    noise: float


def split(by_partition: Mapping[int, Sequence[float]]) -> Split | None:
    """Analysis of variance with one random factor and groups of any size; None with one partition, or if no partition
    has two runs."""
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
    """None where all runs share one partition, or where only one run may be shown."""
    if isinstance(results.study.seeds.partition, int) or results.study.private:
        return None
    objective, cells = results.study.objective_spec, results.of(setting)
    found = {id(cell): split(_by_partition(cell)) for cell in cells}
    caption = (
        f"Sample standard deviation of the {objective.test_title.lower()}{objective.unit} after the last round over "
        "all confirm runs, and its parts due to the partition of the rows over the clients and to the noise "
        "(analysis of variance with the partition as a random factor)."
    )
    if not any(found.values()):
        caption += " The parts are unknown here, because no partition has several runs."
    return cell_table(
        results,
        setting,
        title="Standard deviation due to partition and noise",
        summary="How much of the standard deviation between runs is due to the partition.",
        caption=[caption, *unfinished(cells)],
        columns=["Partitions", "Runs", "Total", "Partition", "Noise"],
        align="rrrrr",
        groups=[
            (budget(epsilon), [(cell, _row(cell, found[id(cell)])) for cell in mine])
            for epsilon in results.study.epsilons
            if (mine := results.of(setting, epsilon))
        ],
        data=pd.DataFrame(
            [_record(cell, found[id(cell)]) for cell in cells],
            columns=[*NAMES, "partitions", "runs", "total_std", "partition_std", "noise_std"],
        ),
    )


def _by_partition(cell: CellResult) -> dict[int, list[float]]:
    """Final scores by partition seed."""
    found: dict[int, list[float]] = {}
    for seed, score in cell.scores_at(cell.last).items():
        found.setdefault(cell.confirm[seed].trial.problem.partition.seed, []).append(score)
    return found


def _row(cell: CellResult, parts: Split | None) -> list[str]:
    by_partition, shown = _by_partition(cell), cell.objective.format
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
