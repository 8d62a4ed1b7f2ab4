"""Hyperparameter importance: the share of the variance of a search's scores that each hyperparameter explains.

A grid is a full factorial design, so its analysis of variance is exact: functional ANOVA (Hutter et al. 2014) without
the random forest. The share of a hyperparameter is the variance of the mean scores of its values; the share of a pair
is the variance of its joint means minus both shares; interactions of three or more explain the rest. A configuration
without a mean, because a seed diverged or failed, counts as the worst one with a mean. Where trials are not a grid,
values are put into at most five bins of equal counts, each hyperparameter is analysed alone, and pairs are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.report.html.configurations import Configuration, varied
from orchestrator.search.objective import Objective

BINS = 5


@dataclass(frozen=True)
class Importance:
    single: dict[str, float]
    """Share of the variance, from 0 to 1."""
    pairs: dict[tuple[str, str], float]
    exact: bool
    """Whether the configurations are a full grid; otherwise values are binned."""
    configurations: int


def importance(configurations: Sequence[Configuration], objective: Objective) -> Importance | None:
    """None if no hyperparameter or no score varies, or if no configuration has a mean."""
    names = varied(configurations)
    costs = [math.nan if c.mean is None else objective.cost(c.mean) for c in configurations]
    if not names or np.isnan(costs).all():
        return None
    y = np.array(costs)
    y[np.isnan(y)] = np.nanmax(y)
    if not y.var() > 0:
        return None
    columns = {name: [c.values.get(name) for c in configurations] for name in names}
    exact = len(configurations) == math.prod(len(set(column)) for column in columns.values())
    codes = {name: _codes(column) if exact else _bins(column) for name, column in columns.items()}
    single = {name: _explained(y, code) for name, code in codes.items()}
    pairs = {}
    if exact:
        for a, b in itertools.combinations(names, 2):
            both = codes[a] * (codes[b].max() + 1) + codes[b]
            pairs[a, b] = max(0.0, _explained(y, both) - single[a] - single[b])
    return Importance(single, pairs, exact, len(configurations))


def _explained(y: NDArray[np.float64], code: NDArray[np.int64]) -> float:
    """The variance of the group means as a share of the total variance."""
    counts = np.bincount(code)
    nonempty = counts > 0
    means = np.bincount(code, weights=y)[nonempty] / counts[nonempty]
    return float((counts[nonempty] * (means - y.mean()) ** 2).sum() / len(y) / y.var())


def _codes(column: Sequence[object]) -> NDArray[np.int64]:
    known = {value: number for number, value in enumerate(dict.fromkeys(column))}
    return np.array([known[value] for value in column])


def _bins(column: Sequence[object]) -> NDArray[np.int64]:
    if len(set(column)) <= BINS or not all(isinstance(value, int | float) for value in column):
        return _codes(column)
    values = np.array(column, dtype=float)
    cuts = np.quantile(values, np.linspace(0, 1, BINS + 1)[1:-1])
    return np.searchsorted(cuts, values, side="right")
