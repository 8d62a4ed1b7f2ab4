"""Where a study runs methods both plainly and in a way of their own, centred say: what that brings, in words."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from orchestrator.report.tables.common import budget
from orchestrator.report.tables.differences import counts, difference
from orchestrator.report.tables.results import CellResult, Results
from trainables.methods import METHODS

PLAIN = ""


def in_words(results: Results, setting: str) -> list[str]:
    """A sentence for every such way; one that says whether second order leads plainly, and one whether it does so."""
    found: list[str] = []
    for search in results.study.ways:
        by_way: dict[str, list[CellResult]] = {}
        for cell in results.of(setting):
            if cell.way == search.name and counts(cell):
                by_way.setdefault(" ".join(cell.method.own_ways), []).append(cell)
        plain = by_way.pop(PLAIN, [])
        gains = [_gain(way, plain, cells) for way, cells in by_way.items()]
        if not any(gains):
            continue
        named = f" ({search.name})" if results.both_ways else ""
        found += [f"{text[0].upper()}{text[1:]}{named}." for text in gains if text]
        duels = {"plainly": _duels(plain), **{way: _duels(cells) for way, cells in by_way.items()}}
        found += [f"Second order against first, {way}{named}: {text}." for way, text in duels.items() if text]
    return found


def _gain(way: str, plain: Sequence[CellResult], cells: Sequence[CellResult]) -> str:
    """What the way brings at every budget, over the methods that run both ways."""
    texts = []
    for epsilon in dict.fromkeys(cell.epsilon for cell in cells):
        before = {cell.method.name: cell for cell in plain if cell.epsilon == epsilon}
        pairs = [(cell, before[cell.method.name]) for cell in _at(epsilon, cells) if cell.method.name in before]
        gaps = [gap.mean for own, other in pairs if (gap := difference(own, other)) is not None]
        if gaps:
            shown = [f"{gap:+{pairs[0][0].objective.form}}" for gap in (fmean(gaps), min(gaps), max(gaps))]
            over = f" on average over {len(gaps)} methods ({shown[1]} to {shown[2]})" if len(gaps) > 1 else ""
            texts.append(f"{shown[0]}{over} at {budget(epsilon)}")
    return f"what '{way}' brings: {', '.join(texts)}" if texts else ""


def _duels(cells: Sequence[CellResult]) -> str:
    """The best method of second order against the best of first, at every budget."""
    texts = []
    for epsilon in dict.fromkeys(cell.epsilon for cell in cells):
        here = _at(epsilon, cells)
        second = [cell for cell in here if METHODS[cell.method.name].second_order]
        first = [cell for cell in here if not METHODS[cell.method.name].second_order]
        if not first or not second:
            continue
        texts.append(f"at {budget(epsilon)} {_duel(_best(second), _best(first))}")
    return "; ".join(texts)


def _duel(ours: CellResult, theirs: CellResult) -> str:
    gap, objective = difference(ours, theirs), ours.objective
    if gap is None:
        return f"{ours.method.shown} and {theirs.method.shown} have no seed in common"
    place = "ahead of" if objective.cost(gap.mean) < 0 else "behind"
    text = f"{ours.method.shown} is {place} {theirs.method.shown} by {objective.shown(abs(gap.mean))}"
    return text if gap.clear else f"{text}, which the seeds cannot tell from nothing"


def _best(cells: Sequence[CellResult]) -> CellResult:
    return min(cells, key=lambda cell: cell.objective.cost(cell.curve[cell.last].mean))


def _at(epsilon: float, cells: Sequence[CellResult]) -> list[CellResult]:
    return [cell for cell in cells if cell.epsilon == epsilon]
