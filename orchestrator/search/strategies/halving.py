"""Successive halving: many random configurations run a few rounds, and only the best continue, rung by rung."""

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
    rounds. In total, this takes about as many rounds as `trials` configurations that run to the end, or fewer."""

    rungs: int = Field(default=3, ge=2, le=len(RUNGS))
    """Number of rungs. The last one runs all rounds."""
    keep: float = Field(default=1 / 3, gt=0, lt=1)
    """Share of the configurations of a rung that continue to the next. The next rung ends after 1 / keep times as many
    rounds."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of the sampler."""

    @property
    def stages(self) -> tuple[str, ...]:
        return RUNGS[: self.rungs]

    def rounds(self, last: int) -> list[int]:
        """The round after which each rung ends, if the last ends after round `last`."""
        return [_ceil(last * self.keep**above) for above in reversed(range(self.rungs))]

    def sizes(self, trials: int, last: int) -> list[int]:
        """The number of configurations on each rung, if none fails. If every rung started at round 0, all rungs
        together would take about as many rounds as `trials` configurations with `last` rounds each. They take fewer,
        because the configurations that are kept continue where they stopped."""
        cost = sum(self.keep**n * rounds / last for n, rounds in enumerate(self.rounds(last)))
        sizes = [max(1, int(trials / cost))]
        while len(sizes) < self.rungs:
            sizes.append(self.continuing(sizes[-1]))
        return sizes

    def continuing(self, count: int) -> int:
        """How many of the `count` configurations of a rung continue."""
        return _ceil(count * self.keep)


def _ceil(amount: float) -> int:
    """Round up, to at least 1. Rounding to 9 digits first removes floating-point errors."""
    return max(1, math.ceil(round(amount, 9)))


class Halving(Strategy):
    """A configuration that continues gets a new trial with more rounds. The result is the same whether that trial
    continues from the state of the earlier one (`trainables.federation.continuation`) or starts at round 0."""

    name = "halving"
    stages = RUNGS
    Settings = HalvingSettings
    caption = (
        "halving: the best configurations of each rung continue on the next one for more rounds; only the last rung, "
        "with all rounds, is compared."
    )

    def propose(self, task: SearchTask, history: History) -> Proposal | None:
        settings = HalvingSettings.of(task.settings)
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
        settings = HalvingSettings.of(task.settings)
        return dict(zip(settings.stages, settings.sizes(task.budget, task.rounds.fine), strict=True))

    def competing(self, stages: Container[str]) -> tuple[str, ...]:
        return super().competing(stages)[-1:]  # lower rungs ran fewer rounds

    def last_round(self, stage: str, planned: int, settings: Section) -> int:
        settings = HalvingSettings.of(settings)
        return settings.rounds(planned)[settings.stages.index(stage)]

    def adds_configurations(self, stage: str) -> bool:
        return stage == RUNGS[0]

    def restarts(self, stage: str) -> bool:
        return True

    def check_space(self, space: SearchSpace) -> str:
        if "rounds" not in space.coarse:
            return ""
        return "tunes `rounds`, but halving compares configurations after equal numbers of rounds"
