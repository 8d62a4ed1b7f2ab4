"""Random search over the ranges of the grids."""

from __future__ import annotations

from pydantic import Field

from orchestrator.search.history import History
from orchestrator.search.ranges import sample
from orchestrator.search.strategies.base import Proposal, Strategy
from orchestrator.search.task import SearchTask
from orchestrator.section import Section


class RandomSettings(Section):
    """Configurations sampled at random from the ranges of the grids."""

    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of the sampler."""


class Random(Strategy):
    name = "random"
    stages = ("random",)
    Settings = RandomSettings

    def propose(self, task: SearchTask, history: History) -> Proposal | None:
        if "random" in history.stages:
            return None
        return Proposal("random", sample(task.space, task.budget, RandomSettings.of(task.settings).seed))

    def expected(self, task: SearchTask) -> dict[str, int]:
        return {"random": task.budget}
