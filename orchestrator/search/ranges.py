"""Configurations from continuous ranges, through Optuna: each axis spans the values of both grids, on its scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import search_spaces
from search_spaces import Configuration, SearchSpace

if TYPE_CHECKING:
    import optuna


def sample(space: SearchSpace, count: int, seed: int) -> list[Configuration]:
    """`count` random configurations."""
    import optuna  # slow to import, and few commands need it

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    return [suggest(space, study.ask()) for _ in range(count)]


def suggest(space: SearchSpace, trial: optuna.trial.Trial) -> Configuration:
    """Every hyperparameter as Optuna's sampler suggests it. Axes of words are categorical."""
    configuration: Configuration = dict(space.fixed)
    for name, axis in space.coarse.items():
        values = list(dict.fromkeys([*axis, *space.fine[name]]))
        if not search_spaces.is_numeric(tuple(values)):
            configuration[name] = trial.suggest_categorical(name, values)  # type: ignore[assignment]
            continue
        low, high = min(float(v) for v in values), max(float(v) for v in values)
        scale = search_spaces.usable_scale(space.scale[name], [low, high])
        if all(isinstance(value, int) for value in values):
            configuration[name] = trial.suggest_int(name, int(low), int(high), log=scale == "log")
        elif scale == "complement":
            configuration[name] = 1 - trial.suggest_float(name, 1 - high, 1 - low, log=True)
        else:
            configuration[name] = trial.suggest_float(name, low, high, log=scale == "log")
    return configuration
