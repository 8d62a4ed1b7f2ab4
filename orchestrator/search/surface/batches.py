"""The next trials of a surface search, for all budgets, and its finalists: configurations that may be the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cholesky

from orchestrator.search.surface.model import Surface

Array = NDArray[np.float64]
KEPT, UPPER = 200, 1.5
"""Candidates per budget from which a batch is chosen: those with the highest mean + UPPER x standard deviation."""
DRAWS = 512
"""Joint draws of the scores of candidates, from which expected best scores are computed."""
DIGITS = 6
"""Values are rounded before they are compared, so that processors whose arithmetic differs in the last bits agree."""


@dataclass
class Candidates:
    """The configurations of a lattice as candidates at one budget."""

    surface: Surface
    budget: int
    """Number of the budget."""
    points: Array
    """Coordinates, one row per configuration."""
    noise: Array
    """`log_noise` of each configuration."""
    available: NDArray[np.bool_]
    """Whether a configuration can run next: not if it has run with all seeds."""

    @cached_property
    def values(self) -> tuple[Array, Array]:
        """Mean and variance of each configuration, as `Surface.values` returns them."""
        return self.surface.values(self.points, self.noise, self.budget)


def next_batch(budgets: Sequence[Candidates], count: int) -> list[tuple[int, int]]:
    """Up to `count` available candidates of every budget, as (number of the budget, index of the candidate), in the
    order chosen."""
    return [
        (number, index)
        for number, candidates in enumerate(budgets)
        for index in _improving(candidates, candidates.available, count)
    ]


def finalists(candidates: Candidates, count: int) -> list[int]:
    """Indices of the candidates that meet in a contest: the best one, and those that may be better. The candidates with
    the highest means are often neighbours, which are good or bad together."""
    leader = best(candidates, 1)
    others = np.ones(len(candidates.points), dtype=bool)
    others[leader] = False
    return [*leader, *_improving(candidates, others, count - 1)]


def _improving(candidates: Candidates, allowed: NDArray[np.bool_], count: int) -> list[int]:
    """Indices of up to `count` allowed candidates, in the order chosen: each raises the expected best score of those
    before it and of the best candidate most. A neighbour of one of these raises it little, even if little is known of
    both, because their scores differ little."""
    surface, (leader,) = candidates.surface, best(candidates, 1)
    mean, variance = candidates.values
    upper = np.where(allowed, mean + UPPER * np.sqrt(variance), -math.inf)
    top = [leader, *(index for index in highest(upper, KEPT) if allowed[index] and index != leader)]
    free = allowed[top]
    inputs = surface.inputs(candidates.points[top], candidates.noise[top])
    mean, covariance = surface.process.joint(inputs, np.full(len(top), candidates.budget))
    normal = np.random.default_rng(0).standard_normal((DRAWS, len(top)))
    draws = mean + normal @ cholesky(covariance, lower=True, check_finite=False).T
    reached = draws[:, 0]
    chosen: list[int] = []
    while len(chosen) < count and free.any():
        gains = np.where(free, np.maximum(draws - reached[:, None], 0).mean(0), -1)
        (at,) = highest(gains, 1)
        chosen.append(top[at])
        free[at] = False  # the same configuration with another seed can follow in the next batch
        reached = np.maximum(reached, draws[:, at])
    return chosen


def best(candidates: Candidates, count: int) -> list[int]:
    """Indices of the candidates with the highest means, best first, whether available or not."""
    return highest(candidates.values[0], count)


def highest(values: Array, count: int) -> list[int]:
    """Indices of the largest values, largest first; ties in order."""
    return [int(index) for index in np.argsort(-np.round(values, DIGITS), kind="stable")[:count]]
