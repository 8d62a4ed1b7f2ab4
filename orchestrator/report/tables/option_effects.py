"""Where a study runs methods both plainly and in a way of their own, centred say: what that brings, in words."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from orchestrator.report.tables.common import budget
from orchestrator.report.tables.differences import counts, difference
from orchestrator.results.winners import CellResult, Results
from trainables.methods import METHODS

PLAIN = ""


def in_words(results: Results, setting: str) -> list[str]:
    """For every such way a sentence on what it brings, and on whether second order leads: plainly, and in that way."""
    found: list[str] = []
    for search in results.study.strategies:
        by_option: dict[str, list[CellResult]] = {}
        for cell in results.of(setting):
            if cell.strategy == search.name and counts(cell):
                by_option.setdefault(", ".join(cell.method.own_options), []).append(cell)
        plain = by_option.pop(PLAIN, [])
        pairs = {strategy: paired for strategy, cells in by_option.items() if (paired := _pairs(cells, plain))}
        if not pairs:
            continue
        named = f" ({search.name})" if results.several_strategies else ""
        clip = results.study.privacy.clip
        found += [
            f"What '{strategy}'{_besides(both, clip)} brings{named}: {_gains(both)}."
            for strategy, both in pairs.items()
        ]
        duels = {"plainly": _duels(plain), **{strategy: _duels(by_option[strategy]) for strategy in pairs}}
        found += [f"Second order against first, {strategy}{named}: {text}." for strategy, text in duels.items() if text]
    return found


Pair = tuple[CellResult, CellResult]


def _pairs(cells: Sequence[CellResult], plain: Sequence[CellResult]) -> list[Pair]:
    """The same variant of a method at the same budget in its own way and plainly."""
    other = {_variant(cell): cell for cell in plain}
    return [(cell, other[key]) for cell in cells if (key := _variant(cell)) in other]


def _variant(cell: CellResult) -> tuple[float, str, str, int | None]:
    return cell.epsilon, cell.method.name, str(sorted(cell.method.fixed.items())), cell.method.rounds


def _besides(pairs: Sequence[Pair], clip: float) -> str:
    """What else sets the two apart: the way is not to be praised for it."""
    clips = {(own.method.clip or clip, other.method.clip or clip) for own, other in pairs}
    grids = dict.fromkeys(own.method.shown for own, other in pairs if own.method.space() != other.method.space())
    texts = [f"clip {now:g} in place of {before:g}" for now, before in sorted(clips) if now != before]
    if grids:
        texts.append(f"another grid for {', '.join(grids)}")
    return f" with {' and '.join(texts)}" if texts else ""


def _gains(pairs: Sequence[Pair]) -> str:
    """At every budget, over the methods."""
    texts = []
    for epsilon in dict.fromkeys(own.epsilon for own, _ in pairs):
        here = [pair for pair in pairs if pair[0].epsilon == epsilon]
        gaps = [gap.mean for own, other in here if (gap := difference(own, other)) is not None]
        if gaps:
            shown = [f"{gap:+{here[0][0].objective.form}}" for gap in (fmean(gaps), min(gaps), max(gaps))]
            over = f" on average over {len(gaps)} methods ({shown[1]} to {shown[2]})" if len(gaps) > 1 else ""
            texts.append(f"{shown[0]}{over} at {budget(epsilon)}")
    return ", ".join(texts)


def _duels(cells: Sequence[CellResult]) -> str:
    """The best method of second order against the best of first, at every budget."""
    texts = []
    for epsilon in dict.fromkeys(cell.epsilon for cell in cells):
        here = [cell for cell in cells if cell.epsilon == epsilon]
        second = [cell for cell in here if METHODS[cell.method.name].second_order]
        first = [cell for cell in here if not METHODS[cell.method.name].second_order]
        if first and second:
            # both were picked by these scores: as wide as if each had met each
            text = _duel(_best(second), _best(first), len(first) * len(second))
            texts.append(f"at {budget(epsilon)} {text}")
    return "; ".join(texts)


def _duel(ours: CellResult, theirs: CellResult, comparisons: int) -> str:
    gap, objective = difference(ours, theirs, comparisons), ours.objective
    if gap is None:
        return f"{ours.method.shown} and {theirs.method.shown} have no seed in common"
    place, by = "ahead of" if objective.cost(gap.mean) < 0 else "behind", objective.shown(abs(gap.mean))
    text = f"{ours.method.shown} is {place} {theirs.method.shown} by {by}"
    if by == objective.shown(0.0):
        text = f"{ours.method.shown} is level with {theirs.method.shown}"
    return text if gap.clear else f"{text}, which the seeds cannot tell from nothing"


def _best(cells: Sequence[CellResult]) -> CellResult:
    return min(cells, key=lambda cell: cell.objective.cost(cell.curve[cell.last].mean))
