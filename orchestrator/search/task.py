"""The input of a search: the cell's search space and the study's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import search_spaces
from orchestrator.search.objective import Objective
from orchestrator.section import Section
from search_spaces import SearchSpace


class StageRounds(NamedTuple):
    """Federated rounds of a trial, as the study file sets them."""

    coarse: int
    """Rounds of the coarse stage of a grid."""
    fine: int
    """Rounds of the other search stages."""
    confirm: int
    """Rounds of the contest, the confirm stage and a private search."""


@dataclass(frozen=True)
class SearchTask:
    """What a strategy may use: the cell's search space and the study's settings. Read-only."""

    space: SearchSpace
    """The axes that the cell's method is tuned over."""
    rounds: StageRounds
    """The study's rounds."""
    objective: Objective
    """The metric that ranks configurations; `objective.cost(score)` is smaller for better scores."""
    validation_rows: int
    """Rows that each configuration is evaluated on."""
    trials: int | None
    """`search.trials`: the number of configurations to try, if the study sets it."""
    refine: str
    """`search.refine`: table or zoom."""
    settings: Section
    """The strategy's own section of the study file."""
    epsilon: float
    """The cell's privacy budget."""
    delta: float
    """The study's delta."""
    seeds: tuple[int, ...] = ()
    """The search seeds."""
    budgets: int = 1
    """Number of budgets of the study."""
    packs_save_time: bool = True
    """Whether a trial takes less time in a pack than alone."""
    noise_by_rounds: Callable[[int], float] | None = field(default=None, compare=False)
    """The function behind `noise`; None if the strategy will not be asked for proposals."""
    secret: bytes = b""
    """Random bytes of this cell, for strategies that publish only their winner."""

    @property
    def budget(self) -> int:
        """Configurations to try: `search.trials`, or as many as the coarse and the fine grid have."""
        grids = self.space.size(self.space.coarse) + search_spaces.refined_size(self.space, self.refine)
        return self.trials or grids

    def noise(self, rounds: int) -> float:
        """The noise multiplier with which a run of this many rounds meets the cell's budget: the standard deviation of
        a round's noise, divided by the sensitivity. 0 without privacy."""
        assert self.noise_by_rounds is not None
        return self.noise_by_rounds(rounds)
