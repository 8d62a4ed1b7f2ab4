"""Why a study's scores are low or uncertain, and what helps: sentences for the analyst, computed from its results.

The sentences depend on private data. A private search gets only those about its winners, which are published."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from orchestrator.report.tables.common import budget, short_name
from orchestrator.report.tables.tuning import edges
from orchestrator.results.doubts import NOISY, least_useful_accuracy, noise_to_signal
from orchestrator.results.winners import CellResult, Results
from orchestrator.study.cell_id import SettingId
from trainables import metrics

MOST_NAMED = 3
NEVER, ALWAYS = 1.0, 99.0
"""Percentages of clipped gradients: report a cell below NEVER or above ALWAYS."""
INFLATED = 2.0
"""Report equal weights if their noise is more than this factor times the noise with weights by size."""
SWING = 2.0
"""Report a score that gets worse by more than this from one evaluation to the next, in points, on average over the
second half of a run, where getting better counts as 0."""
FEWEST_STEPS, OFTEN = 3, 0.25
"""Evaluations that must be compared, over all seeds, and the share of them in which the score must be worse."""
LARGE_ERROR = 2.0
"""Report a larger standard error of a validation score, in points."""

FEW_ROWS = 5
"""Report a rarest class with fewer validation rows."""

Counts = Mapping[SettingId, Sequence[Sequence[int]]]


def diagnoses(results: Results) -> list[str]:
    """A text with cause and remedy for every problem found; the most important first."""
    if results.study.private:
        checks = [_edges]
    else:
        checks = [_at_chance, _below_majority, _swings, _noise, _clipping, _small_clients, _validation, _edges]
    return [sentence for diagnose in checks for sentence in diagnose(results)]


def _at_chance(results: Results) -> Iterator[str]:
    """No method beats guessing by two standard errors: over test rows for accuracy, over seeds for other metrics."""
    metric = metrics.get(results.study.objective)
    for setting, epsilon, cells, shares in _by_budget(results):
        best = max((cell.curve[cell.last] for cell in cells), key=lambda score: score.mean)
        guessing = metric.of_guessing(len(shares))
        if metric.name == "accuracy":
            guessing, least = _largest_class(cells, shares)
            than = f"always answering the largest class ({guessing:.1f}% of the train rows)"
        elif guessing is not None and best.seeds > 1:
            least = guessing + 2 * best.std / math.sqrt(best.seeds)
            than = f"guessing ({guessing:.1f}%)"
        else:
            continue
        if best.mean <= least:
            where = f"{setting}: " if len(results.settings) > 1 else ""
            adaptive = "" if results.study.defaults == "adaptive" else ", `defaults: adaptive`"
            yield (
                f"{where}At {budget(epsilon)} no method is clearly better than {than}: the best has a test "
                f"{metric.title} of {best.mean:.1f}%. A larger ε, more rows{adaptive}{_release(results)} or "
                "features that separate the classes help."
            )


def _release(results: Results) -> str:
    local = results.study.privacy.release == "local"
    return ", `release: secure-aggregation` (if only the sum is visible)" if local else ""


def _by_budget(results: Results) -> Iterator[tuple[str, float, list[CellResult], list[float]]]:
    """Every setting and budget with its cells that have a final score, and the shares of the classes, where these are
    recorded."""
    for setting in results.settings:
        for epsilon in results.study.epsilons:
            cells = [cell for cell in results.of(setting, epsilon) if cell.last in cell.curve]
            if cells and (shares := class_shares(cells[0], results.class_counts)):
                yield setting, epsilon, cells, shares


def _largest_class(cells: Sequence[CellResult], shares: Sequence[float]) -> tuple[float, float]:
    """The accuracy of always answering the largest class, and the least accuracy that is clearly better."""
    largest, facts = 100 * max(shares), cells[0].facts
    return largest, least_useful_accuracy(largest, facts.test_rows if facts else 1)


def _below_majority(results: Results) -> Iterator[str]:
    """Cells that are clearly worse than always answering the largest class, where the best cell is clearly better."""
    if results.study.objective != "accuracy":
        return
    found = []
    for _, _, cells, shares in _by_budget(results):
        largest, least = _largest_class(cells, shares)
        scores = [cell.curve[cell.last].mean for cell in cells]
        if max(scores) > least:
            worse = 2 * largest - least  # two standard errors below
            pairs = zip(cells, scores, strict=True)
            found += [(c, f"{score:.1f}%, largest class {largest:.1f}%") for c, score in pairs if score < worse]
    if found:
        yield (
            f"Worse than always answering the largest class: {_named(found, results)}. Prefer another method. Smaller "
            "learning rates under `coarse` of a method often help."
        )


def _swings(results: Results) -> Iterator[str]:
    """Cells whose score often gets worse late in a run, so that it depends on when training stops."""
    objective = results.study.objective_spec
    if not metrics.get(objective.metric).percent:
        return
    found = []
    for cell in results.cells:
        steps = [
            objective.cost(after) - objective.cost(before)
            for row in cell.confirm.values()
            for before, after in pairwise(_late(row.metrics.get(objective.metric, {})))
        ]
        worse = [step for step in steps if step > 0]
        often = len(steps) >= FEWEST_STEPS and len(worse) >= OFTEN * len(steps)
        if often and sum(worse) > SWING * len(steps):
            found.append((cell, f"by {fmean(worse):.1f} points on average, in {len(worse)} of {len(steps)} steps"))
    if found:
        yield (
            f"Late in a run, the score often gets worse from one evaluation to the next: {_named(found, results)}. The "
            "last score then depends on when training stops. Smaller learning rates under `coarse` of the method, or "
            "more rounds, help."
        )


def _late(by_round: Mapping[int, float]) -> list[float]:
    """The scores of the second half of a run."""
    last = max(by_round, default=0)
    return [score for t, score in sorted(by_round.items()) if 2 * t >= last]


def class_shares(cell: CellResult, counts: Counts) -> list[float]:
    """The share of every class that has train rows; empty if class counts are not recorded."""
    table = counts.get(cell.cell_id.setting)
    if not table or len(table[0]) < 2:
        return []
    by_class = [sum(column) for column in zip(*table, strict=True)]
    return [count / sum(by_class) for count in by_class if count]


def _noise(results: Results) -> Iterator[str]:
    found = []
    for cell in results.cells:
        signal, noise = _measured(cell, "signal_norm"), _measured(cell, "noise_norm")
        if (ratio := noise_to_signal(noise, signal, cell.last)) > NOISY:
            found.append((cell, f"{ratio:.1f} times"))
    if found:
        yield (
            f"Noise exceeds signal, summed over all rounds: {_named(found, results)}. A larger ε, more "
            f"rows{_release(results)} or fewer features help."
        )


def _clipping(results: Results) -> Iterator[str]:
    """Only where the clip is not tuned."""
    never, always = [], []
    for cell in results.cells:
        share = _measured(cell, "clipped_share")
        if "clip" in cell.method.space().coarse or math.isnan(share):
            continue
        clip = next(iter(cell.confirm.values())).trial.privacy.clip
        if share < NEVER:
            never.append((cell, f"clip {clip:g}"))
        elif share > ALWAYS:
            always.append((cell, f"clip {clip:g}"))
    # without `privacy.clip`, the default options tune the clip of methods with few other axes
    methods = {cell.method.id: cell.method for cell, _ in (*never, *always)}.values()
    own = all(method.clip is not None or "clip" in method.space().fixed for method in methods)
    given = results.study.defaults == "adaptive" and not own
    remedy = f"Tune it: {'leave `privacy.clip` out, or ' * given}give an axis `coarse: {{clip: [...]}}`."
    if never:
        yield (
            f"Almost no gradient is clipped, so the clip is larger than needed, and the noise with it: "
            f"{_named(never, results)}. {remedy}"
        )
    if always:
        yield (
            f"Almost every gradient is clipped, so long rows count no more than short ones: {_named(always, results)}. "
            f"A larger clip may be better. {remedy}"
        )


def _small_clients(results: Results) -> Iterator[str]:
    """Releases are divided by |D_i|: with equal weights, the noise of small clients dominates the mean."""
    for setting in results.settings:
        cells = [cell for cell in results.of(setting) if cell.confirm]
        equal = [cell for cell in cells if next(iter(cell.confirm.values())).trial.aggregate == "uniform"]
        table = results.class_counts.get(cells[0].cell_id.setting) if cells else None
        if not equal or not table or results.study.privacy.level != "record":
            continue
        if all(math.isinf(cell.epsilon) for cell in equal):
            continue
        sizes = sorted(sum(row) for row in table)
        ratio = math.sqrt(sum(size**-2 for size in sizes) / len(sizes)) * sum(sizes) / len(sizes)
        if ratio > INFLATED:
            where = f"{setting}: a" if len(results.settings) > 1 else "A"
            yield (
                f"{where} few small clients set the noise (the smallest has {sizes[0]} of {sum(sizes)} rows): with "
                f"equal weights it is {ratio:.1f} times that of weights by size. `aggregate: size` avoids this."
            )


def _validation(results: Results) -> Iterator[str]:
    """Too few validation rows, in total or of the rarest class, whose share is assumed to be as in the train rows."""
    for setting in results.settings:
        facts, cells = results.facts(setting), results.of(setting)
        scores = [cell.search.choice.score for cell in cells if cell.search.choice]
        if facts is None or not scores or not (rows := facts.validation_rows):
            continue
        reasons = []
        if results.study.objective == "accuracy":
            share = min(max(fmean(scores) / 100, 0.0), 1.0)
            error = 100 * math.sqrt(share * (1 - share) / rows)
            if error > LARGE_ERROR:
                reasons.append(f"a score on them has a standard error of {error:.1f} points")
        rarest = rows * min(class_shares(cells[0], results.class_counts), default=1.0)
        if rarest < FEW_ROWS:
            reasons.append(f"the rarest class has about {round(rarest)} of them" if rarest > 0.5
                           else "the rarest class may have none of them")  # fmt: skip
        if reasons:
            where = f"{setting}: " if len(results.settings) > 1 else ""
            yield (
                f"{where}{rows} validation rows are few: {' and '.join(reasons)}, so the search may prefer a worse "
                "configuration. A larger `validation: {fraction}` or fewer, coarser axes help."
            )


def _edges(results: Results) -> Iterator[str]:
    """Winners of finished searches on an edge of the search space. An edge of the fine grid alone does not count: the
    coarse grid has values beyond it."""
    beyond = [
        (cell, ", ".join(marks))
        for cell in results.cells
        if cell.confirm and (marks := [mark for mark in edges(cell) if "(fine)" not in mark])
    ]
    if beyond:
        yield (
            f"In {len(beyond)} of {len(results.cells)} cells the winner lies on an edge of the search space, so a "
            f"better value may lie beyond: {_named(beyond, results)}. Extend these axes under `coarse` of the method."
        )


def _measured(cell: CellResult, name: str) -> float:
    """The mean over the confirm runs and their evaluated rounds; nan without any."""
    values = [v for row in cell.confirm.values() for v in row.metrics.get(name, {}).values() if math.isfinite(v)]
    return fmean(values) if values else math.nan


def _named(found: Sequence[tuple[CellResult, str]], results: Results) -> str:
    several = len(results.settings) > 1
    names = [
        f"{short_name(cell, results)}{f' in {cell.setting}' if several else ''} ({how})"
        for cell, how in found[:MOST_NAMED]
    ]
    more = [f"and {len(found) - MOST_NAMED} more"] if len(found) > MOST_NAMED else []
    return "; ".join([*names, *more])
