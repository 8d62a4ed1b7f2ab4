"""Advice about settings of a study that have no effect, or an unexpected one."""

from __future__ import annotations

from orchestrator.search.strategies import STRATEGIES
from orchestrator.study.settings.method import MethodSettings
from orchestrator.study.study import Study


def advice(study: Study) -> list[str]:
    sentences = []
    unused = [method.shown for method in study.methods if _sets_fine_grid(method)]
    strategies = [STRATEGIES[name] for name in study.search.strategies]
    zooms = all(not s.samples_ranges and s.may_add_stages(study.search.refine) for s in strategies)
    if unused and zooms:
        sentences.append(
            f"the fine grid of {', '.join(unused)} is not used: search.refine = 'zoom' builds a grid around the coarse "
            "winner; 'table' uses the grid as it is given"
        )
    rare = [m.shown for m in study.methods if study.evaluate_every > min(study.stage_rounds(m))]
    if rare:
        sentences.append(
            f"evaluate_every = {study.evaluate_every} is more than the rounds of {', '.join(rare)}: only the last "
            "round is evaluated, and curves have one point"
        )
    return sentences


def _sets_fine_grid(method: MethodSettings) -> bool:
    """Whether the study file, or a file next to it, lists a fine grid."""
    own = method.search_space
    return bool(method.fine) or (own is not None and bool(own.fine))
