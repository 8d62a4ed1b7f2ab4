"""How many trials a cell will have, before all its stages are open."""

from __future__ import annotations

import math
from collections.abc import Mapping

import search_spaces
from orchestrator.search.optuna_search import rung_sizes, search_budget
from orchestrator.search.private_search import mean_runs
from orchestrator.study.settings import MethodSettings, Study
from orchestrator.study.strategies import SearchVariant
from search_spaces import SearchSpace


def expected_trials(
    study: Study, method: MethodSettings, space: SearchSpace, strategy: SearchVariant, opened: Mapping[str, int]
) -> dict[str, int]:
    """Trials of every stage, shared with another or not: as many as were opened, or as it will probably have.
    `opened`: how many are, by stage."""
    if strategy.search == "grid":
        fine = search_spaces.refined_size(space, study.search.refine)
        guess = {"coarse": space.size(space.coarse), "fine": fine}  # whether there will be a finer one nobody knows
    elif strategy.search == "private":
        guess = {"private": round(mean_runs(study, space))}  # nobody is told how many there will be
    elif strategy.search == "halving":
        guess = rung_sizes(study, method, space)
    else:
        guess = {strategy.search: search_budget(study, space)}
    if has_contest(study, strategy):
        guess["contest"] = min(study.search.contenders, sum(guess.get(stage, 0) for stage in strategy.compared(guess)))
    guess["confirm"] = 1
    counts = {stage: count * len(study.seeds_of(strategy, stage)) for stage, count in guess.items()}
    counts |= {stage: count for stage, count in opened.items() if stage != "optuna"}  # opened batch by batch
    return {stage: counts[stage] for stage in strategy.stages if stage in counts}


def yet_to_open(
    study: Study, method: MethodSettings, space: SearchSpace, strategy: SearchVariant, opened: Mapping[str, int]
) -> dict[str, int]:
    """Trials that stages which are not open will add, as far as can be told: what `plan`, a running sweep and `status`
    add to the distinct trials of those that are. Shared ones are not counted again."""
    expected = expected_trials(study, method, space, strategy, opened)
    more = {stage: count - opened.get(stage, 0) for stage, count in expected.items()}
    if more.get("fine"):
        beside = strategy._replace(select="contest")  # tries all that `single` does, on more seeds
        if study.search.refine == "table" and strategy != beside and beside in study.strategies:
            more["fine"] = 0
        else:
            more["fine"] -= _shared(study, method, space) * len(study.seeds_of(strategy, "fine"))
    return {stage: count for stage, count in more.items() if count}


def is_exact(study: Study) -> bool:
    """Whether all that is yet to open is known before anything has run, if only nothing diverges."""
    return len(study.strategies) == 1 and study.search.strategies == ["grid"] and study.search.refine == "table"


def may_grow(study: Study) -> bool:
    """Whether finer grids may follow, of which nobody knows before."""
    return "grid" in study.search.strategies and study.search.refine == "zoom"


def _shared(study: Study, method: MethodSettings, space: SearchSpace) -> int:
    """Configurations of the fine grid that are trials of the coarse one already, around a winner that is on no edge."""
    same_rounds = study.rounds_of(method, "coarse") == study.rounds_of(method, "fine")
    if not (same_rounds or "rounds" in {*space.coarse, *space.fixed}):
        return 0
    if study.search.refine == "zoom":
        return search_spaces.kept_in_zoom(space)
    return math.prod(len({*axis} & {*space.fine[name]}) for name, axis in space.coarse.items())


def has_contest(study: Study, strategy: SearchVariant) -> bool:
    """Whether the best of its search meet again."""
    return strategy.select == "contest" and bool(study.seeds.contest)
