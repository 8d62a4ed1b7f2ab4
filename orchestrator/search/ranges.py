"""Configurations from continuous ranges: each axis spans the values of both grids, on its scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import search_spaces
from search_spaces import Configuration, HyperValue, SearchSpace

if TYPE_CHECKING:
    import optuna


class AxisRange(NamedTuple):
    """The values that an axis may be sampled from."""

    kind: Literal["choice", "integer", "float"]
    values: list[HyperValue]
    """The values of both grids."""
    low: float
    """0 for a choice, like `high`."""
    high: float
    scale: str
    """log, linear or complement (log in 1 - value)."""


def axis_range(space: SearchSpace, name: str) -> AxisRange:
    values = list(dict.fromkeys([*space.coarse[name], *space.fine[name]]))
    if not search_spaces.is_numeric(tuple(values)):
        return AxisRange("choice", values, 0, 0, "linear")
    low, high = min(float(v) for v in values), max(float(v) for v in values)
    scale = search_spaces.usable_scale(space.scale[name], [low, high])
    return AxisRange("integer" if all(isinstance(v, int) for v in values) else "float", values, low, high, scale)


def sample(space: SearchSpace, count: int, seed: int) -> list[Configuration]:
    """`count` random configurations."""
    import optuna  # slow to import, and few commands need it

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    return [suggest(space, study.ask()) for _ in range(count)]


def suggest(space: SearchSpace, trial: optuna.trial.Trial) -> Configuration:
    """A configuration with the values that Optuna's sampler suggests. Axes that are not numeric are categorical."""
    configuration: Configuration = dict(space.fixed)
    for name in space.coarse:
        kind, values, low, high, scale = axis_range(space, name)
        if kind == "choice":
            configuration[name] = trial.suggest_categorical(name, values)  # type: ignore[assignment]
        elif kind == "integer":
            configuration[name] = trial.suggest_int(name, int(low), int(high), log=scale == "log")
        elif scale == "complement":
            configuration[name] = 1 - trial.suggest_float(name, 1 - high, 1 - low, log=True)
        else:
            configuration[name] = trial.suggest_float(name, low, high, log=scale == "log")
    return configuration
