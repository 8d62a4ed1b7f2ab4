"""Optuna's TPE sampler, asked for batches of configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from orchestrator.search.candidates import Rank
from orchestrator.search.history import History
from orchestrator.search.ranges import suggest
from orchestrator.search.strategies.base import Proposal, Strategy
from orchestrator.search.task import SearchTask
from orchestrator.section import Section
from search_spaces import Configuration, SearchSpace

if TYPE_CHECKING:
    import optuna


class OptunaSettings(Section):
    """The TPE sampler, in batches."""

    batch: int = Field(default=16, ge=1)
    """Configurations per batch."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of the sampler."""


class Optuna(Strategy):
    """The sampler's suggestions depend only on its seed and on the results so far, in the order of its suggestions. A
    resumed search replays its batches and gets the same configurations."""

    name = "optuna"
    stages = ("optuna",)
    Settings = OptunaSettings
    extends_stages = True

    def propose(self, task: SearchTask, history: History) -> Proposal | None:
        assert isinstance(task.settings, OptunaSettings)
        candidates = history.candidates("optuna", unique=False)
        sampler = history.memo.setdefault("optuna", _Sampler(task.settings.seed))
        while True:  # once, or for every batch of a search that is replayed
            sampler.tell([history.rank(candidate) for candidate in candidates])
            size = min(task.settings.batch, task.budget - len(sampler.asked))
            if size <= 0:
                return None
            batch = sampler.ask(task.space, size)
            if len(sampler.asked) > len(candidates):
                return Proposal("optuna", batch)

    def expected(self, task: SearchTask) -> dict[str, int]:
        return {"optuna": task.budget}


class _Sampler:
    """Optuna's study with what it was asked, in order."""

    def __init__(self, seed: int) -> None:
        import optuna  # slow to import, and few commands need it

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self.asked: list[optuna.trial.Trial] = []
        self._told = 0

    def ask(self, space: SearchSpace, count: int) -> list[Configuration]:
        batch = [self._study.ask() for _ in range(count)]
        self.asked += batch
        return [suggest(space, trial) for trial in batch]

    def tell(self, ranks: Sequence[Rank]) -> None:
        """The mean over the seeds; a candidate with a failed seed has failed."""
        from optuna.trial import TrialState

        for trial, rank in list(zip(self.asked, ranks, strict=False))[self._told :]:
            if rank.failed:
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._study.tell(trial, -rank.cost)
            self._told += 1
