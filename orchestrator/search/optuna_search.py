"""Optuna's TPE as a way to search a cell."""

from __future__ import annotations

import optuna

import search_spaces
from orchestrator.search.selection import Outcome
from orchestrator.study.cells import Cell
from search_spaces import Configuration, SearchSpace
from trainables.spec import TrialSpec


def search_budget(space: SearchSpace) -> int:
    """How many trials a search that is no grid may have: as many as both grids."""
    return space.size(space.coarse) + space.size(space.fine)


class OptunaSearch:
    """TPE, replayed from its seed: what it asks depends only on what it was told, so a resumed search asks the same."""

    def __init__(self, cell: Cell) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.cell = cell
        self.budget = search_budget(cell.space)
        sampler = optuna.samplers.TPESampler(seed=cell.study.search.optuna.seed, constant_liar=True)
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self._asked: list[tuple[optuna.trial.Trial, TrialSpec]] = []
        self._told = 0

    def next_batch(self, outcomes: dict[str, Outcome]) -> list[TrialSpec]:
        """The next suggestions, once all before them have ended; none when the budget is spent."""
        self._tell(outcomes)
        size = min(self.cell.study.search.optuna.batch, self.budget - len(self._asked))
        asked = [self.study.ask() for _ in range(size)]
        trials = [self.cell.trial("optuna", self._suggest(trial)) for trial in asked]
        self._asked += zip(asked, trials, strict=True)
        return trials

    def _tell(self, outcomes: dict[str, Outcome]) -> None:
        for asked, trial in self._asked[self._told :]:
            state, score, _ = outcomes[trial.key]
            if state == "done" and score is not None:
                self.study.tell(asked, -self.cell.study.judged_by.cost(score))
            else:
                self.study.tell(asked, state=optuna.trial.TrialState.FAIL)
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
