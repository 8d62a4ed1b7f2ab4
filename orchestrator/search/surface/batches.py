"""The next trials of a surface search, for all budgets, and its finalists: configurations that may be the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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
    groups: NDArray[np.int64]
    """Configurations with the same number can share a pack."""

    @cached_property
    def values(self) -> tuple[Array, Array]:
        """Mean and variance of each configuration, as `Surface.values` returns them."""
        return self.surface.values(self.points, self.noise, self.budget)


def next_batch(budgets: Sequence[Candidates], count: int) -> list[tuple[int, int]]:
    """Up to `count` available candidates of every budget, as (number of the budget, index of the candidate), in the
    order chosen. They come from one group whose members can share a pack, because small packs take several times as
    long per trial: the group that raises the expected best scores of the budgets most. If it has too few for a budget,
    the next groups follow."""
    found = [_by_group(candidates, count) for candidates in budgets]
    groups = sorted({group for each in found for group in each})
    gains = [sum(each[group].gain for each in found if group in each) for group in groups]
    order = [groups[at] for at in highest(np.array(gains), len(groups))]
    batch = []
    for number, each in enumerate(found):
        indices = [index for group in order if group in each for index in each[group].indices]
        batch += [(number, index) for index in indices[:count]]
    return batch


def _by_group(candidates: Candidates, count: int) -> dict[int, _Chosen]:
    """The choice from every group that has available candidates."""
    improvement = _Improvement.of(candidates, candidates.available)
    groups = improvement.groups[improvement.free]
    return {int(group): improvement.choose(improvement.groups == group, count) for group in np.unique(groups)}


def finalists(candidates: Candidates, count: int) -> list[int]:
    """Indices of the candidates that meet in a contest: the best one, and those that may be better. The candidates with
    the highest means are often neighbours, which are good or bad together."""
    leader = best(candidates, 1)
    others = np.ones(len(candidates.points), dtype=bool)
    others[leader] = False
    improvement = _Improvement.of(candidates, others)
    return [*leader, *improvement.choose(improvement.free, count - 1).indices]


class _Chosen(NamedTuple):
    indices: list[int]
    """Indices of candidates, in the order chosen."""
    gain: float
    """By how much they raise the expected best score."""


@dataclass(frozen=True)
class _Improvement:
    """The candidates of a budget that may raise its expected best score: those with the highest upper bounds."""

    top: NDArray[np.int64]
    """Their indices; the first is the best one."""
    free: NDArray[np.bool_]
    """Whether each is allowed."""
    groups: NDArray[np.int64]
    draws: Array
    """Joint draws of their scores, one per row."""

    @classmethod
    def of(cls, candidates: Candidates, allowed: NDArray[np.bool_]) -> _Improvement:
        surface, (leader,) = candidates.surface, best(candidates, 1)
        mean, variance = candidates.values
        upper = np.where(allowed, mean + UPPER * np.sqrt(variance), -math.inf)
        top = np.array([leader, *(index for index in highest(upper, KEPT) if allowed[index] and index != leader)])
        inputs = surface.inputs(candidates.points[top], candidates.noise[top])
        mean, covariance = surface.process.joint(inputs, np.full(len(top), candidates.budget))
        normal = np.random.default_rng(0).standard_normal((DRAWS, len(top)))
        draws = mean + normal @ cholesky(covariance, lower=True, check_finite=False).T
        return cls(top, allowed[top], candidates.groups[top], draws)

    def choose(self, among: NDArray[np.bool_], count: int) -> _Chosen:
        """Up to `count` allowed candidates among these. Each raises the expected best score of those before it and of
        the best candidate most. A neighbour of one of these raises it little, even if little is known of both, because
        their scores differ little."""
        free, reached = self.free & among, self.draws[:, 0]
        chosen: list[int] = []
        while len(chosen) < count and free.any():
            gains = np.where(free, np.maximum(self.draws - reached[:, None], 0).mean(0), -1)
            (at,) = highest(gains, 1)
            chosen.append(int(self.top[at]))
            free[at] = False  # the same configuration with another seed can follow in the next batch
            reached = np.maximum(reached, self.draws[:, at])
        return _Chosen(chosen, float((reached - self.draws[:, 0]).mean()))


def best(candidates: Candidates, count: int) -> list[int]:
    """Indices of the candidates with the highest means, best first, whether available or not."""
    return highest(candidates.values[0], count)


def highest(values: Array, count: int) -> list[int]:
    """Indices of the largest values, largest first; ties in order."""
    return [int(index) for index in np.argsort(-np.round(values, DIGITS), kind="stable")[:count]]
