"""The findings of a study and their caveats as sentences, all computed from its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from orchestrator.report.html.diagnosis_text import class_shares, diagnoses
from orchestrator.report.tables.accuracy import not_monotone
from orchestrator.report.tables.common import budget, mean_and_std, method_name, short_name, unfinished
from orchestrator.report.tables.differences import can_lead, difference, tied_for_best
from orchestrator.report.tables.publication import sentences
from orchestrator.results.winners import CellResult, Results

FEW_SEEDS = 3
MOST_NAMED = 5
MANY_TIED = 5
GAP_IN_DEVIATIONS = 3.0
LOST_SHARE = 0.2


def summary(results: Results) -> list[dict[str, Any]]:
    """One heading per setting, one sentence per budget, and what a model that learned nothing scores."""
    return [
        {
            "heading": setting,
            "sentences": [_at_budget(results, setting, epsilon) for epsilon in results.study.epsilons],
            "baseline": _baseline(results, setting),
        }
        for setting in results.settings
    ]


def _baseline(results: Results, setting: str) -> str:
    """What a constant prediction scores. Empty without recorded class counts, in a private search, and for metrics
    other than accuracy and balanced accuracy."""
    cells = results.of(setting)
    shares = class_shares(cells[0], results.class_counts) if cells and not results.study.private else []
    if results.study.objective == "accuracy" and shares:
        return f"Always predicting the largest class is right for {100 * max(shares):.1f} % of the train rows."
    if results.study.objective == "balanced_accuracy" and shares:
        return f"Always predicting one class has a balanced accuracy of {100 / len(shares):.1f} %."
    return ""


def _at_budget(results: Results, setting: str, epsilon: float) -> dict[str, Any]:
    objective = results.study.objective_spec
    cells = [cell for cell in results.of(setting, epsilon) if can_lead(cell)]
    order = sorted(cells, key=lambda cell: objective.cost(cell.curve[cell.last].mean))
    text = _leader(order, results) if order else "no method has finished all confirm seeds yet."
    winner = order[0].name if order else None
    return {"epsilon": epsilon, "text": f"At {budget(epsilon)} {text}", "winner": winner}


def _leader(order: Sequence[CellResult], results: Results) -> str:
    """Which method leads, and which are not significantly behind. `order`: the cells, best first."""
    (best, *others), unit = order, results.study.objective_spec.unit.strip(" ()")
    value = mean_and_std(best.curve[best.last], best.objective) + (f" {unit}" if unit else "")
    title = best.objective.test_title
    score = f"a {title[0].lower()}{title[1:]} of {value}"
    if not others:
        return f"{method_name(best, results)} is the only method, with {score}."
    text = f"{method_name(best, results)} leads with {score}{_lead(best, others[0], results)}"
    marked = tied_for_best(order, [cell.last for cell in order])  # those that are bold in the tables
    single = len(best.seeds) < 2  # no significance without a second seed
    tied = [method_name(other, results) for other, mark in zip(others, marked[1:], strict=True) if mark or single]
    if not tied:
        which = "the difference is significant" if len(others) == 1 else "all other methods are significantly behind"
        return f"{text}; {which}."
    seeds = _seeds(len(best.seeds))
    if len(tied) == len(others):
        which = "the difference is" if len(others) == 1 else "the differences to all other methods are"
        return f"{text}; {which} not significant over {seeds}."
    return f"{text}; not significantly behind over {seeds}: {'; '.join(tied)}."


def _lead(best: CellResult, second: CellResult, results: Results) -> str:
    """By how much the best leads the second, with a confidence interval in which positive values favour the best."""
    gap, objective = difference(best, second), results.study.objective_spec
    if gap is None:
        return ""
    low, high = (gap.low, gap.high) if not objective.lower_is_better else (-gap.high, -gap.low)
    better = "lower" if objective.lower_is_better else "higher"
    interval = "" if math.isinf(high) else f" ({_number(low)} to {_number(high)})"
    return f", {_number(abs(gap.mean))} {better} than {method_name(second, results)}{interval}"


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def _number(value: float) -> str:
    return (f"{value:.2f}" if abs(value) >= 0.005 else f"{value:.2g}").replace("-", "−")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# ---- caveats


def caveats(results: Results) -> list[str]:
    return [
        *unfinished(results.cells),
        *_claims(results),
        *_few_seeds(results),
        *_lost(results),
        *diagnoses(results),
        *_tied(results),
        *_validation_gaps(results),
        *_not_monotone(results),
        *_search_cost(results),
    ]


def _claims(results: Results) -> list[str]:
    broken = [cell for cell in results.cells if cell.confirm and not cell.keeps_its_claim]
    if not broken:
        return []
    return [f"{_cells(broken, results)}: the actual ε exceeds the claimed ε, see the privacy account."]


def _few_seeds(results: Results) -> list[str]:
    if results.study.private:
        return ["Every score comes from a single run; the spread between runs is unknown."]
    seeds = results.study.seeds.confirm
    searched = sorted(
        {
            seed
            for variant in results.study.variants
            for seed in (
                variant.search_seeds if variant.strategy.chooses_seeds else variant.seeds(variant.strategy.stages[0])
            )
        }
    )
    sentences: list[str] = []
    if len(seeds) < FEW_SEEDS:
        sentences.append(f"Winners were confirmed with {_seeds(len(seeds))} only.")
    if len(searched) == 1:
        sentences.append(
            f"Configurations were compared on a single seed ({searched[0]}), so a winner may owe its score to chance."
        )
    if shared := [seed for seed in searched if seed in seeds]:
        sentences.append(
            f"Search and confirm share seed {_listed([str(seed) for seed in shared])}, so winners are confirmed with "
            "the noise that selected them."
        )
    return sentences


def _lost(results: Results) -> list[str]:
    sentences: list[str] = []
    broken = [cell for cell in results.cells if any(row.state != "done" for row in cell.confirm.values())]
    if broken:
        sentences.append(f"Confirm runs diverged or failed: {_cells(broken, results)}.")
    lossy = [
        cell
        for cell in results.cells
        if cell.search.states and 1 - cell.search.states["done"] / cell.search.states.total() > LOST_SHARE
    ]
    if lossy:
        sentences.append(f"Over {LOST_SHARE:.0%} of the search trials diverged or failed: {_cells(lossy, results)}.")
    return sentences


def _searched(results: Results) -> list[CellResult]:
    """Cells whose search is over, so that their winner is final."""
    return [cell for cell in results.cells if cell.confirm]


def _tied(results: Results) -> list[str]:
    close = [
        (choice.within_standard_error, cell)
        for cell in _searched(results)
        if (choice := cell.search.choice) and (choice.within_standard_error or 0) > MANY_TIED
    ]
    if not close:
        return []
    count, most = max(close, key=lambda item: item[0] or 0)
    return [
        f"In {len(close)} of {len(results.cells)} cells more than {MANY_TIED} configurations lie within one standard "
        f"error of the winner, so their order is chance (most: {count} for {_cell(most, results)})."
    ]


def _validation_gaps(results: Results) -> list[str]:
    """Cells whose winner scores differently on validation and test rows."""
    far: list[tuple[float, CellResult]] = []
    for cell in results.cells:
        if cell.search.choice and cell.complete(cell.last):
            score = cell.curve[cell.last]
            gap = cell.search.choice.score - score.mean
            if abs(gap) > GAP_IN_DEVIATIONS * math.hypot(score.std, _error_of_rows(results, cell, score.mean)):
                far.append((gap, cell))
    if not far:
        return []
    gap, cell = max(far, key=lambda item: abs(item[0]))
    more_rows = results.study.confirm_train_on == "all"
    below = "confirm also trains on the validation rows, or " if more_rows else ""
    better = gap < 0 if results.study.objective_spec.lower_is_better else gap > 0
    why = "selection bias, or " if better else below
    return [
        f"In {len(far)} of {len(results.cells)} cells validation and test differ by more than {GAP_IN_DEVIATIONS:g} "
        f"standard deviations over seeds and rows; most for {_cell(cell, results)}, where validation is "
        f"{_number(abs(gap))} {'higher' if gap > 0 else 'lower'}. Possible reasons: {why}the two sets of rows differ."
    ]


def _error_of_rows(results: Results, cell: CellResult, accuracy: float) -> float:
    """Standard error of the difference between two accuracies that comes from the choice of validation and test rows;
    0 for other objectives."""
    facts = results.facts(cell.setting)
    if results.study.objective != "accuracy" or facts is None or not facts.validation_rows:
        return 0.0
    share = accuracy / 100
    return 100 * math.sqrt(share * (1 - share) * (1 / facts.validation_rows + 1 / max(1, facts.test_rows)))


def _not_monotone(results: Results) -> list[str]:
    """The notes that the accuracy tables print too, with the setting if there are several."""
    return [
        sentence if len(results.settings) == 1 else f"{setting}: {sentence}"
        for setting in results.settings
        for sentence in not_monotone(results, setting)
    ]


def _search_cost(results: Results) -> list[str]:
    if all(math.isinf(epsilon) for epsilon in results.study.epsilons):
        return []
    if results.study.private:
        return [
            "ε covers one run. Publishing the winner of a search costs the ε with search of the privacy account.",
            *sentences(results),
        ]
    return [
        "Every ε covers one training run, published alone. The search used the same private rows many times; the chart "
        "of scores against ε shows its cost as ε with search.",
        *sentences(results),
    ]


def _cell(cell: CellResult, results: Results) -> str:
    """The name of a cell, with the setting if there are several."""
    name = short_name(cell, results)
    return f"{name} in {cell.setting}" if len(results.settings) > 1 else name


def _cells(cells: Sequence[CellResult], results: Results) -> str:
    names = [_cell(cell, results) for cell in cells]
    more = [f"and {len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return "; ".join([*names[:MOST_NAMED], *more])  # names may contain commas
