"""How many trials a cell will have, before all its stages are open."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.search.optuna_search import search_budget
from orchestrator.study.settings import Study
from search_spaces import SearchSpace


def expected_trials(study: Study, space: SearchSpace, way: str, opened: Mapping[str, int]) -> dict[str, int]:
    """Trials of every stage: as many as were opened, or as it will probably have. `opened`: how many are, by stage."""
    if way == "grid":
        guess = {"coarse": space.size(space.coarse), "fine": space.size(space.fine)}
    else:
        guess = {"optuna": search_budget(space)}  # opened batch by batch
    guess["confirm"] = len(study.seeds.confirm)
    return {stage: count if stage == "optuna" else opened.get(stage, count) for stage, count in guess.items()}
