"""Configurations from ranges instead of a grid: asked of Optuna's TPE, which learns, or drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import optuna

import search_spaces
from orchestrator.search.contenders import Contender, Outcome
from orchestrator.study.cells import Cell
from orchestrator.study.settings import MethodSettings, Study
from search_spaces import Configuration, SearchSpace
from trainables.federation.trial_spec import TrialSpec


def search_budget(study: Study, space: SearchSpace) -> int:
    """How many configurations a search that is no grid may try: as the study says, or as many as both grids have."""
    grids = space.size(space.coarse) + search_spaces.refined_size(space, study.search.refine)
    return study.search.trials or grids


def rung_sizes(study: Study, method: MethodSettings, space: SearchSpace) -> dict[str, int]:
    """Configurations on every rung of halving, if none is lost."""
    halving = study.search.halving
    sizes = halving.sizes(search_budget(study, space), study.rounds_of(method, halving.stages[-1]))
    return dict(zip(halving.stages, sizes, strict=True))


class OptunaSearch:
    """Replayed from its seed: what it asks depends only on what it was told, so a resumed search asks the same."""

    def __init__(self, cell: Cell, trials_of: Callable[[str, Sequence[Configuration]], list[TrialSpec]]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.cell = cell
        self.budget = search_budget(cell.study, cell.space)
        settings = cell.study.search.optuna
        self.batch = settings.batch
        sampler = optuna.samplers.TPESampler(seed=settings.seed, constant_liar=True)
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self._trials_of = trials_of
        self._asked: list[tuple[optuna.trial.Trial, Contender]] = []
        self._told = 0

    def next_batch(self, outcomes: Mapping[str, Outcome]) -> list[TrialSpec]:
        """The next suggestions with all their seeds, once all before them have ended; none when the budget is spent."""
        size = min(self.batch, self.budget - len(self._asked))
        if not size:
            return []
        self._tell(outcomes)
        batch: list[TrialSpec] = []
        for asked in [self.study.ask() for _ in range(size)]:
            trials = self._trials_of("optuna", [_suggested(self.cell.space, asked)])
            self._asked.append((asked, Contender(tuple(trial.key for trial in trials))))
            batch += trials
        return batch

    def _tell(self, outcomes: Mapping[str, Outcome]) -> None:
        """The mean over seeds; one that was lost on any seed has failed."""
        for asked, contender in self._asked[self._told :]:
            standing = contender.standing(outcomes, self.cell.study.judged_by)
            if standing.lost:
                self.study.tell(asked, state=optuna.trial.TrialState.FAIL)
            else:
                self.study.tell(asked, -standing.cost)
        self._told = len(self._asked)


def draw(space: SearchSpace, count: int, seed: int) -> list[Configuration]:
    """At random, all at once."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    return [_suggested(space, study.ask()) for _ in range(count)]


def _suggested(space: SearchSpace, trial: optuna.trial.Trial) -> Configuration:
    """Every axis between the lowest and the highest value of both grids, on its scale; words among those given."""
    found: Configuration = dict(space.fixed)
    for name, axis in space.coarse.items():
        values = list(dict.fromkeys([*axis, *space.fine[name]]))
        if not search_spaces.is_numeric(tuple(values)):
            found[name] = trial.suggest_categorical(name, values)  # type: ignore[assignment]
            continue
        low, high = min(float(v) for v in values), max(float(v) for v in values)
        scale = search_spaces.usable_scale(space.scale[name], [low, high])
        if all(isinstance(value, int) for value in values):
            found[name] = trial.suggest_int(name, int(low), int(high), log=scale == "log")
        elif scale == "complement":
            found[name] = 1 - trial.suggest_float(name, 1 - high, 1 - low, log=True)
        else:
            found[name] = trial.suggest_float(name, low, high, log=scale == "log")
    return found
