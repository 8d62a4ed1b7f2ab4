"""Paired differences between methods over the seeds that they share, and what is significantly better than what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtr, stdtrit

from orchestrator.report.tables.common import budget, cell_table, unfinished
from orchestrator.report.tables.render import NOTHING, Bold, Table
from orchestrator.results.winners import CellResult, Results

CONFIDENCE = 0.95
SIGNIFICANCE = 0.05
SMALLEST_P = 0.0001


@dataclass(frozen=True)
class Difference:
    """By how much one cell's score exceeds another's, paired by seed."""

    mean: float
    low: float
    high: float
    """Ends of the confidence interval; infinite with a single seed."""
    seeds: int
    p: float
    """Two-sided paired t-test; 1 with a single seed."""

    @property
    def clear(self) -> bool:
        """Whether the confidence interval excludes zero."""
        return self.low > 0 or self.high < 0


def difference(a: CellResult, b: CellResult, comparisons: int = 1, t: int | None = None) -> Difference | None:
    """a minus b over the seeds that both have, after round t (default: the last round of each). The interval is widened
    for the number of comparisons (Bonferroni). None without a common seed."""
    ours, theirs = (cell.scores_at(cell.last if t is None else t) for cell in (a, b))
    gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not gaps:
        return None
    mean, n = fmean(gaps), len(gaps)
    if n < 2:
        return Difference(mean, -math.inf, math.inf, n, 1.0)
    error = stdev(gaps) / math.sqrt(n)
    reach = float(stdtrit(n - 1, 1 - (1 - CONFIDENCE) / 2 / comparisons)) * error
    distance = abs(mean) / error if error else math.inf if mean else 0.0
    return Difference(mean, mean - reach, mean + reach, n, 2 * float(stdtr(n - 1, -distance)))


def holm(values: Sequence[float]) -> list[float]:
    """p-values corrected for multiple comparisons by Holm's method."""
    order = sorted(range(len(values)), key=values.__getitem__)
    corrected, highest = [0.0] * len(values), 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - place) * values[index]))
        corrected[index] = highest
    return corrected


def comparisons(count: int) -> str:
    return "the only comparison" if count == 1 else f"all {count} comparisons"


def can_lead(cell: CellResult, t: int | None = None) -> bool:
    """Whether a cell may be called best: every seed has finished, the privacy claim holds, and the method is not run as
    its authors released it."""
    return cell.complete(cell.last if t is None else t) and cell.keeps_its_claim and not cell.method.as_released


def tied_for_best(cells: Sequence[CellResult], rounds: Sequence[int]) -> list[bool]:
    """Which cells have the best mean after their round, a mean that is printed as the same number or, with several
    seeds, one that does not differ significantly from it. All False if fewer than two cells can lead."""
    leading = [(cell, t) for cell, t in zip(cells, rounds, strict=True) if can_lead(cell, t)]
    if len(leading) < 2:
        return [False] * len(cells)
    objective = cells[0].objective
    best, best_t = min(leading, key=lambda pair: objective.cost(pair[0].curve[pair[1]].mean))
    shown = objective.format(best.curve[best_t].mean)
    others = [(cell, t) for cell, t in leading if cell is not best]
    gaps = [_between(best, best_t, cell, t) for cell, t in others]
    tied = {id(best)}
    for (cell, t), gap, p in zip(others, gaps, holm([gap.p for gap in gaps]), strict=True):
        if objective.format(cell.curve[t].mean) == shown or (gap.seeds > 1 and p >= SIGNIFICANCE):
            tied.add(id(cell))
    return [id(cell) in tied for cell in cells]


def _between(a: CellResult, a_t: int, b: CellResult, b_t: int) -> Difference:
    """The difference after a common round, or after the last round of each if `a_t` and `b_t` differ. Both cells must
    have every seed."""
    gap = difference(a, b, t=b_t if a_t == b_t else None)
    assert gap is not None
    return gap


def differences(results: Results, setting: str) -> Table | None:
    """Every method against the reference over the confirm seeds; None with one method or one seed."""
    study, objective = results.study, results.study.objective_spec
    if len(study.methods) < 2 or len(study.seeds.confirm) < 2:
        return None
    ours, others = against_reference(results, setting)
    gaps = {cell.name: difference(ours[cell.epsilon, cell.variant.name], cell) for cell in others}
    tested = {cell: gap.p for cell, gap in gaps.items() if gap is not None and gap.seeds > 1}
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    name = study.reference.shown
    caption = (
        f"{objective.test_title}{objective.unit} after the last round: {name} minus each other method, paired by seed. "
        f"Mean difference, {CONFIDENCE:.0%} confidence interval and p-value of a paired t-test over the seeds that "
        f"both have. p (Holm) is corrected for {comparisons(len(tested))} of this table and bold below "
        f"{SIGNIFICANCE}. The test asks whether training again with other seeds would show the same difference, "
        "given the same data and chosen configurations."
    )
    return cell_table(
        results,
        setting,
        title=f"{name} against the other methods, paired by seed",
        summary=f"By how much {name} is ahead of each other method, and whether that is significant over the seeds.",
        caption=[caption, *unfinished(results.of(setting))],
        columns=dict.fromkeys(["Difference", f"{CONFIDENCE:.0%} interval", "Seeds", "p", "p (Holm)"], "r"),
        groups=[
            (budget(e), [(c, _row(c, gaps[c.name], corrected.get(c.name))) for c in others if c.epsilon == e])
            for e in study.epsilons
        ],
        records=[(c, {"reference": name, **_record(gaps[c.name], corrected.get(c.name))}) for c in others],
        fields=("reference", "difference", "low", "high", "seeds", "p", "p_holm"),
    )


def against_reference(results: Results, setting: str) -> tuple[dict[tuple[float, str], CellResult], list[CellResult]]:
    """The cells of the study's reference method, by budget and strategy, and all other cells of the setting."""
    cells, reference = results.of(setting), results.study.reference
    ours = {(cell.epsilon, cell.variant.name): cell for cell in cells if cell.method == reference}
    return ours, [cell for cell in cells if cell.method != reference]


def _row(cell: CellResult, gap: Difference | None, corrected: float | None) -> list[str]:
    if gap is None:
        return [NOTHING] * 5
    shown = cell.objective.format
    if corrected is None:
        return [shown(gap.mean), NOTHING, str(gap.seeds), NOTHING, NOTHING]
    interval = f"{shown(gap.low)} to {shown(gap.high)}"
    return [shown(gap.mean), interval, str(gap.seeds), shown_p(gap.p), bold_if_significant(corrected)]


def _record(gap: Difference | None, corrected: float | None) -> dict[str, object]:
    if gap is None:
        return {}
    record: dict[str, object] = {"difference": gap.mean, "seeds": gap.seeds}
    if corrected is None:
        return record
    return {**record, "low": gap.low, "high": gap.high, "p": gap.p, "p_holm": corrected}


def shown_p(p: float) -> str:
    return f"<{SMALLEST_P}" if p < SMALLEST_P else f"{p:.4f}"


def bold_if_significant(p: float) -> str:
    return Bold(shown_p(p)) if p < SIGNIFICANCE else shown_p(p)
