"""How many trials a cell will have, before all its stages are open."""

from __future__ import annotations

from collections.abc import Mapping

import search_spaces
from orchestrator.search.optuna_search import search_budget
from orchestrator.study.settings import Study
from orchestrator.study.ways import Way
from search_spaces import SearchSpace


def expected_trials(study: Study, space: SearchSpace, way: Way, opened: Mapping[str, int]) -> dict[str, int]:
    """Trials of every stage: as many as were opened, or as it will probably have. `opened`: how many are, by stage."""
    if way.search == "grid":
        fine = search_spaces.refined_size(space, study.search.refine)
        guess = {"coarse": space.size(space.coarse), "fine": fine}  # whether there will be a finer one nobody knows
    else:
        guess = {way.search: search_budget(study, space)}
    if has_contest(study, way):
        guess["contest"] = min(study.search.contenders, sum(guess.values()))
    guess["confirm"] = 1
    counts = {stage: count * len(study.seeds_of(way, stage)) for stage, count in guess.items()}
    counts |= {stage: count for stage, count in opened.items() if stage != "optuna"}  # opened batch by batch
    return {stage: counts[stage] for stage in way.stages if stage in counts}


def has_contest(study: Study, way: Way) -> bool:
    """Whether the best of its search meet again."""
    return way.select == "contest" and bool(study.seeds.contest)
