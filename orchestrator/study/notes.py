"""What a study says that will not have the effect one might expect: no mistake, but better said than found out."""

from __future__ import annotations

from orchestrator.study.settings import MethodSettings, Study


def notes(study: Study) -> list[str]:
    """Sentences for whoever plans or runs it."""
    found = []
    unused = [method.shown for method in study.methods if _gives_fine(method)]
    if unused and study.search.strategies == ["grid"] and study.search.refine == "zoom":
        found.append(
            f"the fine grid of {', '.join(unused)} is not used: search.refine = 'zoom' looks around the coarse winner; "
            "'table' takes the grid as it is given"
        )
    seldom = [method.shown for method in study.methods if study.evaluate_every > _fewest_rounds(study, method)]
    if seldom:
        found.append(
            f"evaluate_every = {study.evaluate_every} is more than the rounds of {', '.join(seldom)}: only the last is "
            "judged, and curves have one point"
        )
    return found


def _fewest_rounds(study: Study, method: MethodSettings) -> int:
    return min(study.rounds_of(method, stage) for stage in ("coarse", "fine", "confirm"))


def _gives_fine(method: MethodSettings) -> bool:
    """Whether the study itself gives one, or a file beside it does."""
    own = method.search_space
    return bool(method.fine) or (own is not None and bool(own.fine))
