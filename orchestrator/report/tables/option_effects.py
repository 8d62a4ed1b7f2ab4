"""Sentences about methods that a study runs both without and with options, such as centred features: the gain from the
options, and how second-order methods compare with first-order ones."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from orchestrator.report.tables.common import budget
from orchestrator.report.tables.differences import can_lead, difference
from orchestrator.results.winners import CellResult, Results
from trainables.methods import METHODS

Pair = tuple[CellResult, CellResult]
"""A cell with options and its plain counterpart."""


def sentences(results: Results, setting: str) -> list[str]:
    """The effect of every set of options. Then the best second-order against the best first-order method, without
    options and with each set of options."""
    texts: list[str] = []
    for strategy in results.study.variants:
        by_options: dict[str, list[CellResult]] = {}
        for cell in results.of(setting):
            if cell.variant.name == strategy.name and can_lead(cell):
                by_options.setdefault(", ".join(cell.method.own_options), []).append(cell)
        plain = by_options.pop("", [])
        pairs = {options: paired for options, cells in by_options.items() if (paired := _pairs(cells, plain))}
        if not pairs:
            continue
        named = f" ({strategy.name})" if results.several_strategies else ""
        clip = results.study.privacy.clip
        texts += [
            f"Effect of '{options}'{named}{_other_changes(both, clip)}: {_gains(both)}."
            for options, both in pairs.items()
        ]
        compared = {"without options": _by_order(plain)}
        compared |= {options: _by_order(by_options[options]) for options in pairs}
        texts += [
            f"Second-order against first-order methods, {which}{named}: {text}."
            for which, text in compared.items()
            if text
        ]
    return texts


def _pairs(cells: Sequence[CellResult], plain: Sequence[CellResult]) -> list[Pair]:
    counterparts = {_without_options(cell): cell for cell in plain}
    return [(cell, counterparts[key]) for cell in cells if (key := _without_options(cell)) in counterparts]


def _without_options(cell: CellResult) -> tuple[float, str, str, int | None]:
    """What a cell and its plain counterpart have in common."""
    return cell.epsilon, cell.method.name, str(sorted(cell.method.fixed.items())), cell.method.rounds


def _other_changes(pairs: Sequence[Pair], clip: float) -> str:
    """What else differs within the pairs, so that the effect is not attributed to the options alone."""
    clips = {(own.method.clip or clip, other.method.clip or clip) for own, other in pairs}
    grids = dict.fromkeys(own.method.shown for own, other in pairs if own.method.space() != other.method.space())
    texts = [f"clip {now:g} instead of {before:g}" for now, before in sorted(clips) if now != before]
    if grids:
        texts.append(f"another grid for {'; '.join(grids)}")
    return f", with {' and '.join(texts)}" if texts else ""


def _gains(pairs: Sequence[Pair]) -> str:
    """The gain at every budget: mean and range over the methods."""
    texts = []
    for epsilon in dict.fromkeys(own.epsilon for own, _ in pairs):
        here = [pair for pair in pairs if pair[0].epsilon == epsilon]
        gaps = [gap.mean for own, other in here if (gap := difference(own, other)) is not None]
        if gaps:
            shown = [f"{gap:+{here[0][0].objective.format_spec}}" for gap in (fmean(gaps), min(gaps), max(gaps))]
            over = f" on average over {len(gaps)} methods ({shown[1]} to {shown[2]})" if len(gaps) > 1 else ""
            texts.append(f"{shown[0]}{over} at {budget(epsilon)}")
    return ", ".join(texts)


def _by_order(cells: Sequence[CellResult]) -> str:
    """The best second-order method against the best first-order method, at every budget."""
    texts = []
    for epsilon in dict.fromkeys(cell.epsilon for cell in cells):
        here = [cell for cell in cells if cell.epsilon == epsilon]
        second = [cell for cell in here if METHODS[cell.method.name].second_order]
        first = [cell for cell in here if not METHODS[cell.method.name].second_order]
        if first and second:
            # both were selected by these scores, so the interval is corrected for all pairs
            text = _comparison(_best(second), _best(first), len(first) * len(second))
            texts.append(f"at {budget(epsilon)} {text}")
    return "; ".join(texts)


def _comparison(ours: CellResult, theirs: CellResult, comparisons: int) -> str:
    gap, objective = difference(ours, theirs, comparisons), ours.objective
    a, b = (cell.method.shown.removesuffix(f", {', '.join(cell.method.own_options)}") for cell in (ours, theirs))
    if gap is None:
        return f"{a} and {b} have no seed in common"
    place, by = "ahead of" if objective.cost(gap.mean) < 0 else "behind", objective.format(abs(gap.mean))
    text = f"{a} is level with {b}" if by == objective.format(0.0) else f"{a} is {place} {b} by {by}"
    return text if gap.clear else f"{text} (not significant over the seeds)"


def _best(cells: Sequence[CellResult]) -> CellResult:
    return min(cells, key=lambda cell: cell.objective.cost(cell.curve[cell.last].mean))
