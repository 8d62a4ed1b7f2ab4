"""What a study found, in words, and what of it to distrust. Every sentence is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from orchestrator.report.tables.accuracy import not_monotone
from orchestrator.report.tables.common import budget, mean_and_std, short_name, unfinished
from orchestrator.report.tables.differences import can_lead, difference, tied_for_best
from orchestrator.report.tables.tuning import edges
from orchestrator.results.winners import CellResult, Results

FEW_SEEDS = 3
MANY_NEAR = 5
GAP_IN_DEVIATIONS = 3.0
LOST_SHARE = 0.2


# ---- what was found


def summary(results: Results) -> list[dict[str, Any]]:
    """A heading per setting, a sentence per budget."""
    return [
        {
            "heading": setting,
            "sentences": [_at_budget(results, setting, epsilon) for epsilon in results.study.epsilons],
        }
        for setting in results.settings
    ]


def _at_budget(results: Results, setting: str, epsilon: float) -> dict[str, Any]:
    objective, at = results.study.judged_by, f"At {budget(epsilon)}"
    unit = objective.unit.strip(" ()")
    cells = [cell for cell in results.of(setting, epsilon) if can_lead(cell)]
    if not cells:
        return {"epsilon": epsilon, "text": f"{at} no method has been confirmed with every seed yet.", "winner": None}
    order = sorted(cells, key=lambda cell: objective.cost(cell.curve[cell.last].mean))
    best, others = order[0], order[1:]
    text = f"{at} {_name(best, results)} {'leads' if others else 'is alone'} with {_shown(best)}{unit and ' ' + unit}"
    if not others:
        return {"epsilon": epsilon, "text": text + ".", "winner": best.id}
    marked = tied_for_best(order, [cell.last for cell in order])  # as bold in the tables
    single = len(best.seeds) < 2  # which tells nothing apart
    tied = [_name(other, results) for other, mark in zip(others, marked[1:], strict=True) if mark or single]
    text += _lead(best, others[0], results)
    if not tied:
        text += ", which is clearly behind." if len(others) == 1 else ", and every other method is clearly behind."
    elif len(tied) == len(others):
        text += "; the two" if len(others) == 1 else "; it and the others"
        text += f" cannot be told apart by {_seeds(best)}."
    else:
        text += f"; {_listed(tied)} cannot be told from it by {_seeds(best)}, the others are clearly behind."
    return {"epsilon": epsilon, "text": text, "winner": best.id}


def _lead(best: CellResult, second: CellResult, results: Results) -> str:
    """By how much, in the direction that is better."""
    gap, objective = difference(best, second), results.study.judged_by
    if gap is None:
        return ""
    low, high = (gap.low, gap.high) if not objective.lower_is_better else (-gap.high, -gap.low)
    interval = "" if math.isinf(high) else f" ({_number(low)} to {_number(high)})"
    return f", {_number(abs(gap.mean))} {_better(results)} than {_name(second, results)}{interval}"


def _shown(cell: CellResult) -> str:
    return mean_and_std(cell.curve[cell.last], cell.objective)


def _name(cell: CellResult, results: Results) -> str:
    return f"{cell.method.shown} ({cell.strategy})" if results.several_strategies else cell.method.shown


def _better(results: Results) -> str:
    return "lower" if results.study.judged_by.lower_is_better else "higher"


def _seeds(cell: CellResult) -> str:
    return f"{len(cell.seeds)} seed{'s' if len(cell.seeds) > 1 else ''}"


def _number(value: float) -> str:
    return (f"{value:.2f}" if abs(value) >= 0.005 else f"{value:.2g}").replace("-", "−")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# ---- what to distrust


def distrust(results: Results) -> list[str]:
    return [
        *unfinished(results.cells),
        *_claims(results),
        *_few_seeds(results),
        *_lost(results),
        *_edges(results),
        *_near(results),
        *_gaps(results),
        *_not_monotone(results),
        *_price_of_the_search(results),
    ]


def _claims(results: Results) -> list[str]:
    broken = [cell for cell in results.cells if cell.confirm and not cell.keeps_its_claim]
    if not broken:
        return []
    return [f"The noise of {_cells(broken, results)} does not buy the ε that is claimed: see the privacy account."]


def _few_seeds(results: Results) -> list[str]:
    if results.study.private:
        return ["Every score is of one run: how far another would have come, with other noise, is not known."]
    seeds = results.study.seeds.confirm
    searched = sorted(
        {seed for strategy in results.study.strategies for seed in results.study.seeds_of(strategy, "coarse")}
    )
    found = []
    if len(seeds) < FEW_SEEDS:
        found.append(f"Winners were confirmed with {len(seeds)} seed{'s' if len(seeds) > 1 else ''} only.")
    if len(searched) == 1:
        found.append(
            f"Configurations were compared with a single seed ({searched[0]}): what won may have had luck rather than "
            "merit."
        )
    if shared := [seed for seed in searched if seed in seeds]:
        found.append(
            f"Search and confirm share seed {_listed([str(seed) for seed in shared])}, so the noise that chose a "
            "configuration also judges it."
        )
    return found


def _lost(results: Results) -> list[str]:
    found = []
    broken = [cell for cell in results.cells if any(row.state != "done" for row in cell.confirm.values())]
    if broken:
        found.append(f"Not every confirm run of {_cells(broken, results)} came to its end.")
    lossy = [
        cell
        for cell in results.cells
        if cell.search.states and 1 - cell.search.states["done"] / cell.search.states.total() > LOST_SHARE
    ]
    if lossy:
        found.append(f"More than {LOST_SHARE:.0%} of the search trials of {_cells(lossy, results)} did not end well.")
    return found


def _searched(results: Results) -> list[CellResult]:
    """Those whose search is over: before that, who leads may not win."""
    return [cell for cell in results.cells if cell.confirm]


def _edges(results: Results) -> list[str]:
    beyond = [(cell, marks) for cell in _searched(results) if (marks := [m for m in edges(cell) if "(fine)" not in m])]
    if not beyond:
        return []
    told = [f"{_told(cell, results)} ({', '.join(marks)})" for cell, marks in beyond[:MANY_NEAR]]
    more = f", and {len(beyond) - len(told)} more" if len(beyond) > len(told) else ""
    return [
        f"In {len(beyond)} of {len(results.cells)} cells the winner sits on an edge of all that was tried, so a better "
        f"one may lie beyond: {', '.join(told)}{more}."
    ]


def _near(results: Results) -> list[str]:
    close = [(near, cell) for cell in _searched(results) if (near := _within(cell)) > MANY_NEAR]
    if not close:
        return []
    near, most = max(close, key=lambda item: item[0])
    return [
        f"In {len(close)} of {len(results.cells)} cells more than {MANY_NEAR} configurations lie within one standard "
        f"error of the winner (most for {_told(most, results)}: {near}): their order is chance."
    ]


def _within(cell: CellResult) -> int:
    return (cell.search.choice.within_standard_error or 0) if cell.search.choice else 0


def _gaps(results: Results) -> list[str]:
    """Where the validation score of the winner is far from what the test rows say."""
    far: list[tuple[float, CellResult]] = []
    for cell in results.cells:
        if cell.search.choice and cell.complete(cell.last):
            score = cell.curve[cell.last]
            gap = cell.search.choice.score - score.mean
            if abs(gap) > GAP_IN_DEVIATIONS * (score.std if not math.isnan(score.std) else math.inf):
                far.append((gap, cell))
    if not far:
        return []
    gap, cell = max(far, key=lambda item: abs(item[0]))
    more_rows = results.study.confirm_train_on == "all"
    below = "confirm trains on the validation rows, too, or " if more_rows else ""
    why = "the choice was optimistic, or " if gap > 0 else below
    return [
        f"In {len(far)} of {len(results.cells)} cells validation and test differ by more than {GAP_IN_DEVIATIONS:g} "
        f"deviations between seeds (most for {_told(cell, results)}: {_number(abs(gap))} "
        f"{'higher' if gap > 0 else 'lower'} in the search): {why}the two sets of rows differ."
    ]


def _not_monotone(results: Results) -> list[str]:
    """Under the accuracy tables they stand as well; here with their setting where there are several."""
    return [
        sentence if len(results.settings) == 1 else f"{setting}: {sentence}"
        for setting in results.settings
        for sentence in not_monotone(results, setting)
    ]


def _price_of_the_search(results: Results) -> list[str]:
    if all(math.isinf(epsilon) for epsilon in results.study.epsilons):
        return []
    if results.study.private:
        return [
            "ε is that of one run; to publish the winner of a search costs the ε with search of the privacy account, "
            "and several rows about the same data cost more."
        ]
    return [
        "Every ε is that of one training run, published alone. The search looked at the same private rows many times; "
        "what that would cost is shown under accuracy against ε, with search."
    ]


def _told(cell: CellResult, results: Results) -> str:
    """A cell, with its setting where there are several."""
    name = short_name(cell, results)
    return f"{name} in {cell.setting}" if len(results.settings) > 1 else name


def _cells(cells: Sequence[CellResult], results: Results) -> str:
    names = [_told(cell, results) for cell in cells]
    return (
        _listed(names)
        if len(names) <= MANY_NEAR
        else f"{', '.join(names[:MANY_NEAR])} and {len(names) - MANY_NEAR} more"
    )
