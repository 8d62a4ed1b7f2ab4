"""Optuna's samplers, asked for batches of configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.search import optuna_samplers
from orchestrator.search.optuna_samplers import Option
from orchestrator.search.ranges import suggest
from orchestrator.search.strategies.ask_tell import AskTellStrategy, BatchSettings, Result
from orchestrator.search.task import SearchTask
from orchestrator.section import Section
from search_spaces import Configuration

if TYPE_CHECKING:
    import optuna


class OptunaSettings(BatchSettings):
    """A sampler of Optuna, in batches."""

    sampler: str = "tpe"
    """tpe, gp, cmaes, random, qmc, nsgaii, nsgaiii, or another sampler of the installed Optuna: the name of its class
    in lower case, without `Sampler`."""
    options: dict[str, Option] = {}
    """The sampler's own options, as Optuna documents them."""


class Optuna(AskTellStrategy):
    name = "optuna"
    Settings = OptunaSettings

    def searcher(self, task: SearchTask) -> _Sampler:
        return _Sampler(task, OptunaSettings.of(task.settings))

    def check_settings(self, settings: Section) -> str:
        settings = OptunaSettings.of(settings)
        if settings == OptunaSettings(batch=settings.batch, seed=settings.seed):
            return ""  # the default needs no check, and importing Optuna is slow
        return optuna_samplers.problem(settings.sampler, settings.options)


class _Sampler:
    """A `Searcher` that asks an Optuna study for configurations."""

    def __init__(self, task: SearchTask, settings: OptunaSettings) -> None:
        import optuna  # slow to import, and few commands need it

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna_samplers.build(settings.sampler, settings.seed, settings.options)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._space = task.space
        self._batch: list[optuna.trial.Trial] = []

    def ask(self, count: int) -> list[Configuration]:
        self._batch = [self._study.ask() for _ in range(count)]
        return [suggest(self._space, trial) for trial in self._batch]

    def tell(self, results: Sequence[Result]) -> None:
        from optuna.trial import TrialState

        for trial, result in zip(self._batch, results, strict=True):
            if result.cost is None:
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._study.tell(trial, -result.cost)
