"""Successive halving: many random configurations run a few rounds, the best of them more, the last ones all rounds."""

from __future__ import annotations

import math
from collections.abc import Container

from pydantic import Field

import search_spaces
from orchestrator.search.history import History
from orchestrator.search.ranges import sample
from orchestrator.search.strategies.base import Proposal, Strategy
from orchestrator.search.task import SearchTask
from orchestrator.section import Section
from search_spaces import SearchSpace

RUNGS = ("rung-1", "rung-2", "rung-3", "rung-4", "rung-5")


class HalvingSettings(Section):
    """Random configurations run a few rounds, and the best of each rung continue, until the last rung has run all
    rounds. This takes at most as many rounds as `trials` configurations that run to the end."""

    rungs: int = Field(default=3, ge=2, le=len(RUNGS))
    """Number of rungs. The last one runs all rounds."""
    keep: float = Field(default=1 / 3, gt=0, lt=1)
    """Share of a rung that continues on the next, which ends after 1 / keep times as many rounds."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of the sampler."""

    @property
    def stages(self) -> tuple[str, ...]:
        return RUNGS[: self.rungs]

    def rounds(self, last: int) -> list[int]:
        """Rounds of each rung, if the last runs `last`."""
        return [_ceil(last * self.keep**above) for above in reversed(range(self.rungs))]

    def sizes(self, trials: int, last: int) -> list[int]:
        """Configurations on each rung, if none fails, at the cost of `trials` configurations with `last` rounds if
        every rung started at round 0. Less is computed, because survivors continue."""
        cost = sum(self.keep**n * rounds / last for n, rounds in enumerate(self.rounds(last)))
        sizes = [max(1, int(trials / cost))]
        while len(sizes) < self.rungs:
            sizes.append(self.continuing(sizes[-1]))
        return sizes

    def continuing(self, count: int) -> int:
        """How many of `count` configurations continue."""
        return _ceil(count * self.keep)


def _ceil(amount: float) -> int:
    """Rounded up to at least 1, but not because of the last bits of a product."""
    return max(1, math.ceil(round(amount, 9)))


class Halving(Strategy):
    """A survivor is a new trial with more rounds. Its result does not depend on whether it continues from the state of
    the earlier trial (`trainables.federation.continuation`) or starts at round 0."""

    name = "halving"
    stages = RUNGS
    Settings = HalvingSettings
    caption = (
        "halving: the best configurations of each rung continue on the next one for more rounds; only the last rung, "
        "with all rounds, is compared."
    )

    def propose(self, task: SearchTask, history: History) -> Proposal | None:
        settings = _settings(task.settings)
        opened = [rung for rung in settings.stages if rung in history.stages]
        if len(opened) == settings.rungs:
            return None
        if not opened:
            count = self.expected(task)[settings.stages[0]]
            return Proposal(settings.stages[0], search_spaces.unique(sample(task.space, count, settings.seed)))
        below = history.candidates(opened[-1])
        best = history.ranked(opened[-1])[: settings.continuing(len(below))]
        if not best:
            return None
        return Proposal(settings.stages[len(opened)], [history.configuration(candidate) for candidate in best])

    def expected(self, task: SearchTask) -> dict[str, int]:
        settings = _settings(task.settings)
        return dict(zip(settings.stages, settings.sizes(task.budget, task.rounds.fine), strict=True))

    def competing(self, stages: Container[str]) -> tuple[str, ...]:
        return super().competing(stages)[-1:]  # lower rungs ran fewer rounds

    def last_round(self, stage: str, planned: int, settings: Section) -> int:
        settings = _settings(settings)
        return settings.rounds(planned)[settings.stages.index(stage)]

    def adds_configurations(self, stage: str) -> bool:
        return stage == RUNGS[0]

    def restarts(self, stage: str) -> bool:
        return True

    def check_space(self, space: SearchSpace) -> str:
        return "searches over rounds, but halving compares after equal rounds" if "rounds" in space.coarse else ""


def _settings(settings: Section) -> HalvingSettings:
    assert isinstance(settings, HalvingSettings)
    return settings
