"""Optuna's TPE as a way to search a cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import optuna

import search_spaces
from orchestrator.search.contenders import Contender, Outcome, Standing
from orchestrator.study.cells import Cell
from search_spaces import Configuration, SearchSpace
from trainables.spec import TrialSpec


def search_budget(space: SearchSpace) -> int:
    """How many trials a search that is no grid may have: as many as both grids."""
    return space.size(space.coarse) + space.size(space.fine)


class OptunaSearch:
    """TPE, replayed from its seed: what it asks depends only on what it was told, so a resumed search asks the same."""

    def __init__(self, cell: Cell, trials_of: Callable[[str, Sequence[Configuration]], list[TrialSpec]]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.cell = cell
        self.budget = search_budget(cell.space)
        sampler = optuna.samplers.TPESampler(seed=cell.study.search.optuna.seed, constant_liar=True)
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self._trials_of = trials_of
        self._asked: list[tuple[optuna.trial.Trial, Contender]] = []
        self._told = 0

    def next_batch(self, outcomes: Mapping[str, Outcome]) -> list[TrialSpec]:
        """The next suggestions with all their seeds, once all before them have ended; none when the budget is spent."""
        self._tell(outcomes)
        size = min(self.cell.study.search.optuna.batch, self.budget - len(self._asked))
        batch: list[TrialSpec] = []
        for asked in [self.study.ask() for _ in range(size)]:
            trials = self._trials_of("optuna", [self._suggest(asked)])
            self._asked.append((asked, Contender(tuple(trial.key for trial in trials))))
            batch += trials
        return batch

    def _tell(self, outcomes: Mapping[str, Outcome]) -> None:
        """The mean over seeds; one that was lost on any seed has failed."""
        for asked, contender in self._asked[self._told :]:
            standing = Standing.of(contender, outcomes, self.cell.study.judged_by)
            if standing.lost:
                self.study.tell(asked, state=optuna.trial.TrialState.FAIL)
            else:
                self.study.tell(asked, -standing.cost)
        self._told = len(self._asked)

    def _suggest(self, trial: optuna.trial.Trial) -> Configuration:
        space: SearchSpace = self.cell.space
        found: Configuration = dict(space.fixed)
        for name, axis in space.coarse.items():
            values = list(dict.fromkeys([*axis, *space.fine[name]]))
            if not search_spaces.is_numeric(tuple(values)):
                found[name] = trial.suggest_categorical(name, values)  # type: ignore[assignment]
                continue
            low, high = min(float(v) for v in values), max(float(v) for v in values)
            if all(isinstance(value, int) for value in values):
                found[name] = trial.suggest_int(name, int(low), int(high))
            elif (scale := search_spaces.usable_scale(space.scale[name], [low, high])) == "complement":
                found[name] = 1 - trial.suggest_float(name, 1 - high, 1 - low, log=True)
            else:
                found[name] = trial.suggest_float(name, low, high, log=scale == "log")
        return found
