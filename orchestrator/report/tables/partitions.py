"""How much of the standard deviation between runs is due to the partition, and how much to the noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from orchestrator.report.tables.common import by_budget, cell_table, unfinished
from orchestrator.report.tables.render import NOTHING, Table
from orchestrator.results.winners import CellResult, Results
from orchestrator.search.objective import Objective


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
    """None where all runs share one partition, and for a private search, which shows only one run."""
    if isinstance(results.study.seeds.partition, int) or results.study.private:
        return None
    objective, cells = results.study.objective_spec, results.of(setting)
    found = {cell.name: _record(cell) for cell in cells}
    caption = (
        f"Sample standard deviation of the {objective.test_title.lower()}{objective.unit} after the last round over "
        "all confirm runs, and its parts due to the partition of the rows over the clients and to the noise "
        "(analysis of variance with the partition as a random factor)."
    )
    if all(math.isnan(record["noise_std"]) for record in found.values()):
        caption += " The parts are unknown here, because no partition has several runs."
    return cell_table(
        results,
        setting,
        title="Standard deviation due to partition and noise",
        summary="How much of the standard deviation between runs is due to the partition.",
        caption=[caption, *unfinished(cells)],
        columns=dict.fromkeys(["Partitions", "Runs", "Total", "Partition", "Noise"], "r"),
        groups=by_budget(results, setting, lambda cell: _row(found[cell.name], objective)),
        records=[(cell, found[cell.name]) for cell in cells],
    )


def _by_partition(cell: CellResult) -> dict[int, list[float]]:
    """Final scores by partition seed."""
    found: dict[int, list[float]] = {}
    for seed, score in cell.scores_at(cell.last).items():
        found.setdefault(cell.confirm[seed].trial.problem.partition.seed, []).append(score)
    return found


def _record(cell: CellResult) -> dict[str, float]:
    """The number of partitions and runs, and the standard deviations; nan if unknown."""
    by_partition = _by_partition(cell)
    scores = [score for group in by_partition.values() for score in group]
    parts = split(by_partition) or Split(stdev(scores) if len(scores) > 1 else math.nan, math.nan, math.nan)
    deviations = {f"{name}_std": value for name, value in vars(parts).items()}
    return {"partitions": len(by_partition), "runs": len(scores), **deviations}


def _row(record: dict[str, float], objective: Objective) -> list[str]:
    partitions, runs, *deviations = record.values()
    return [str(partitions), str(runs), *(NOTHING if math.isnan(d) else objective.format(d) for d in deviations)]
