"""Grid search from coarse to fine: a wide grid, then finer ones around the best configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence

import search_spaces
from orchestrator.search.candidates import Candidate
from orchestrator.search.history import History
from orchestrator.search.strategies.base import Proposal, Strategy
from orchestrator.search.task import SearchTask, StageRounds
from search_spaces import Configuration


class Grid(Strategy):
    """`refine: table` runs the fine grid of the search space as it is written. `refine: zoom` builds a grid around the
    coarse winner, and up to two finer ones on axes where the best value is still uncertain."""

    name = "grid"
    stages = ("coarse", "fine", "finer", "finest")
    samples_ranges = False

    def propose(self, task: SearchTask, history: History) -> Proposal | None:
        if "coarse" not in history.stages:
            return Proposal("coarse", task.space.grid(task.space.coarse))
        if "fine" not in history.stages:
            best = history.best("coarse")
            if best is None:
                return None
            return Proposal("fine", search_spaces.refine(task.space, task.refine, history.configuration(best)))
        if task.refine == "zoom":
            stage = next((stage for stage in ("finer", "finest") if stage not in history.stages), None)
            grid = _finer_grid(task, history) if stage else []
            if stage and grid:
                return Proposal(stage, grid)
        return None

    def expected(self, task: SearchTask) -> dict[str, int]:
        space = task.space
        return {"coarse": space.size(space.coarse), "fine": search_spaces.refined_size(space, task.refine)}

    def planned_rounds(self, stage: str, rounds: StageRounds) -> int:
        return rounds.coarse if stage == "coarse" else rounds.fine

    def already_run(self, task: SearchTask) -> dict[str, int]:
        space = task.space
        same_rounds = task.rounds.coarse == task.rounds.fine or "rounds" in {*space.coarse, *space.fixed}
        if not same_rounds:
            return {}
        if task.refine == "zoom":
            return {"fine": search_spaces.zoom_overlap(space)}  # assuming that the coarse winner is on no edge
        return {"fine": math.prod(len({*axis} & {*space.fine[name]}) for name, axis in space.coarse.items())}

    def fixed_configurations(self, task: SearchTask) -> dict[str, list[Configuration]]:
        space = task.space
        fine = {"fine": space.grid(space.fine)} if task.refine == "table" else {}
        return {"coarse": space.grid(space.coarse), **fine}

    def is_exact(self, refine: str) -> bool:
        return refine == "table"

    def may_add_stages(self, refine: str) -> bool:
        return refine == "zoom"


def _finer_grid(task: SearchTask, history: History) -> list[Configuration]:
    """A further zoom, on the axes where the best value is the lowest or highest tried, or where a neighbour's score
    clearly differs from the best."""
    space, stages = task.space, Grid.stages
    candidates = history.candidates(*stages)
    best = history.best(*stages)
    if best is None:
        return []
    tried = {name: tuple(dict.fromkeys(history.configuration(c)[name] for c in candidates)) for name in space.coarse}
    winner = history.configuration(best)
    uncertain = [
        name
        for name, axis in tried.items()
        if search_spaces.is_numeric(axis)
        and (
            search_spaces.on_edge(axis, winner[name])
            or any(history.clearly_differ(best, other) for other in _neighbours(task, history, best, name, candidates))
        )
    ]
    return search_spaces.refine_again(space, tried, winner, uncertain) if uncertain else []


def _neighbours(
    task: SearchTask, history: History, winner: Candidate, axis: str, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """The candidates next to the winner on one axis, below and above, that equal it on all other axes."""
    ours = history.configuration(winner)
    value = float(ours[axis])
    on_axis: dict[float, Candidate] = {}
    for candidate in candidates:
        configuration = history.configuration(candidate)
        if all(configuration[name] == ours[name] for name in task.space.coarse if name != axis):
            on_axis.setdefault(float(configuration[axis]), candidate)
    below = max((other for other in on_axis if other < value), default=None)
    above = min((other for other in on_axis if other > value), default=None)
    return [on_axis[other] for other in (below, above) if other is not None]
