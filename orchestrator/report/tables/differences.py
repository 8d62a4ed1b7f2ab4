"""Who is better than whom, as far as the seeds can tell: differences are paired, since methods share their seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import pandas as pd
from scipy.special import stdtr, stdtrit

from orchestrator.report.tables.common import NAMES, budget, name_columns, named_rows, names, unfinished
from orchestrator.report.tables.render import NOTHING, Bold, Group, Table
from orchestrator.results.winners import CellResult, Results

CONFIDENCE = 0.95
SIGNIFICANCE = 0.05
SMALLEST_P = 0.0001


@dataclass(frozen=True)
class Difference:
    """By how much one cell's score exceeds another's, seed by seed."""

    mean: float
    low: float
    high: float
    """Of an interval that holds the true difference with the confidence asked for; infinite with a single seed."""
    seeds: int
    p: float
    """How often chance alone would set them that far apart (Student's t, two-sided); 1 with a single seed."""

    @property
    def clear(self) -> bool:
        return self.low > 0 or self.high < 0


def difference(a: CellResult, b: CellResult, comparisons: int = 1, t: int | None = None) -> Difference | None:
    """Paired over the seeds that both have, after the last round or after round t; with several comparisons their
    intervals hold together."""
    ours, theirs = (cell.scores_at(cell.last if t is None else t) for cell in (a, b))
    found = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not found:
        return None
    mean, n = fmean(found), len(found)
    if n < 2:
        return Difference(mean, -math.inf, math.inf, n, 1.0)
    error = stdev(found) / math.sqrt(n)
    reach = float(stdtrit(n - 1, 1 - (1 - CONFIDENCE) / 2 / comparisons)) * error
    distance = abs(mean) / error if error else math.inf if mean else 0.0
    return Difference(mean, mean - reach, mean + reach, n, 2 * float(stdtr(n - 1, -distance)))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's correction: p-values that may be compared with the level of all comparisons together."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found, highest = [0.0] * len(values), 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - place) * values[index]))
        found[index] = highest
    return found


def counts(cell: CellResult, t: int | None = None) -> bool:
    """Whether a cell may lead: all seeds there, the claim kept, and not a program run as released."""
    return cell.complete(cell.last if t is None else t) and cell.keeps_its_claim and not cell.method.as_released


def tied_for_best(cells: Sequence[CellResult], rounds: Sequence[int]) -> list[bool]:
    """Which have the best mean after a round of their own, or cannot be told from it. One seed tells nothing: then only
    those that print the same."""
    there = [(cell, t) for cell, t in zip(cells, rounds, strict=True) if counts(cell, t)]
    if len(there) < 2:
        return [False] * len(cells)
    objective = cells[0].objective
    best, at = min(there, key=lambda found: objective.cost(found[0].curve[found[1]].mean))
    shown = objective.shown(best.curve[at].mean)
    others = [(cell, t) for cell, t in there if cell is not best]
    gaps = [_between(best, at, cell, t) for cell, t in others]
    level = holm([gap.p for gap in gaps])
    alike = {id(best)}
    for (cell, t), gap, p in zip(others, gaps, level, strict=True):
        if objective.shown(cell.curve[t].mean) == shown or (gap.seeds > 1 and p >= SIGNIFICANCE):
            alike.add(id(cell))
    return [id(cell) in alike for cell in cells]


def _between(a: CellResult, at: int, b: CellResult, t: int) -> Difference:
    """After rounds of their own; both have every seed. Methods that run for longer than others meet them at their
    ends."""
    found = difference(a, b, t=t if at == t else None)
    assert found is not None
    return found


def differences(results: Results, setting: str) -> Table | None:
    """Every method against the reference, over the confirm seeds; None if there is nothing to compare with."""
    study, objective = results.study, results.study.judged_by
    if len(study.methods) < 2 or len(study.seeds.confirm) < 2:
        return None
    found: list[tuple[CellResult, Difference | None]] = []
    for epsilon in study.epsilons:
        mine = results.of(setting, epsilon)
        ours = {cell.strategy: cell for cell in mine if cell.method == study.reference}
        found += [(cell, difference(ours[cell.strategy], cell)) for cell in mine if cell.method != study.reference]
    tested = [gap for _, gap in found if gap is not None and gap.seeds > 1]
    corrected = dict(zip(map(id, tested), holm([gap.p for gap in tested]), strict=True))
    groups, records = [], []
    for epsilon in study.epsilons:
        here = [(cell, gap) for cell, gap in found if cell.epsilon == epsilon]
        lines = [_line(cell, gap, corrected.get(id(gap))) for cell, gap in here]
        groups.append(Group(budget(epsilon), named_rows(results, [cell for cell, _ in here], lines)))
        records += [_record(cell, gap, corrected.get(id(gap)), study.reference.shown) for cell, gap in here]
    name = study.reference.shown
    caption = (
        f"{objective.final}{objective.unit} of {name} minus that of each other method after the last round, seed by "
        f"seed: mean, {CONFIDENCE:.0%} interval and p by Student's t over the seeds that both have. p (Holm) is "
        f"corrected for all {len(tested)} comparisons of this table; below {SIGNIFICANCE} it is bold. This asks "
        "whether training again with other seeds would show the same, with the same data and chosen configurations."
    )
    return Table(
        title=f"{name} against the others, paired over seeds: {setting}",
        summary=f"By how much {name} is ahead of each other method, and whether that is more than chance.",
        caption=" ".join([caption, *unfinished(results.of(setting))]),
        columns=[*name_columns(results), "Difference", f"{CONFIDENCE:.0%} interval", "Seeds", "p", "p (Holm)"],
        align="l" * len(name_columns(results)) + "rrrrr",
        groups=groups,
        data=pd.DataFrame(
            records, columns=[*NAMES, "reference", "difference", "low", "high", "seeds", "p", "p_holm"]
        ).astype({"seeds": "Int64"}),
    )


def _line(cell: CellResult, gap: Difference | None, corrected: float | None) -> list[str]:
    if gap is None:
        return [NOTHING] * 5
    shown = cell.objective.shown
    if corrected is None:
        return [shown(gap.mean), NOTHING, str(gap.seeds), NOTHING, NOTHING]
    p = shown_p(corrected)
    interval = f"{shown(gap.low)} to {shown(gap.high)}"
    return [shown(gap.mean), interval, str(gap.seeds), shown_p(gap.p), Bold(p) if corrected < SIGNIFICANCE else p]


def _record(cell: CellResult, gap: Difference | None, corrected: float | None, reference: str) -> dict[str, object]:
    tested = gap is not None and corrected is not None
    return {
        **names(cell),
        "reference": reference,
        "difference": gap.mean if gap else None,
        "low": gap.low if gap and tested else None,
        "high": gap.high if gap and tested else None,
        "seeds": gap.seeds if gap else None,
        "p": gap.p if gap and tested else None,
        "p_holm": corrected,
    }


def shown_p(p: float) -> str:
    return f"<{SMALLEST_P}" if p < SMALLEST_P else f"{p:.4f}"
