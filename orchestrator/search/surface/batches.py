"""The next trials of a surface search, for all budgets: where the model expects high scores or is uncertain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from orchestrator.search.surface.gaussian_process import noise_variance
from orchestrator.search.surface.model import Surface

Array = NDArray[np.float64]
KEPT = 200
"""Candidates per budget from which a batch is chosen: those with the highest upper bounds."""
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


def next_batch(budgets: Sequence[Candidates], count: int, optimism: float) -> list[tuple[int, int]]:
    """Up to `count` candidates of every budget, as (number of the budget, index of the candidate), in the order chosen.

    Each choice maximises mean + optimism x standard deviation. The standard deviations assume that the earlier choices
    have run, whatever their results, so a batch spreads over the space and the budgets."""
    surface = budgets[0].surface
    kept, inputs, labels, limits = [], [], [], [0]
    for candidates in budgets:
        mean, variance = candidates.values
        upper = np.where(candidates.available, np.round(mean + optimism * np.sqrt(variance), DIGITS), -math.inf)
        top = np.sort(np.argsort(-upper, kind="stable")[:KEPT])
        top = top[candidates.available[top]]
        kept.append(top)
        inputs.append(surface.inputs(candidates.points[top], candidates.noise[top]))
        labels.append(np.full(len(top), candidates.budget))
        limits.append(limits[-1] + len(top))
    joined, label = np.concatenate(inputs), np.concatenate(labels)
    mean, variance, whitened = surface.process.predict(joined, label)
    noise = noise_variance(surface.process.parameters, joined[:, 0], np.clip(-mean / 10, 0, 1.5))
    reductions: list[Array] = []
    chosen: list[tuple[int, int]] = []
    free = np.ones(len(joined), dtype=bool)
    for _ in range(count):
        for number in range(len(budgets)):
            own = slice(limits[number], limits[number + 1])
            upper = np.where(free[own], np.round(mean[own] + optimism * np.sqrt(variance[own]), DIGITS), -math.inf)
            if not len(upper) or upper.max() == -math.inf:
                continue
            at = limits[number] + int(upper.argmax())
            chosen.append((number, int(kept[number][at - limits[number]])))
            free[at] = False  # the same configuration with a second seed can follow in the next batch
            covariance = surface.process.covariance(joined, label, at) - whitened.T @ whitened[:, at]
            for reduction in reductions:
                covariance -= reduction * reduction[at]
            reductions.append(covariance / math.sqrt(max(covariance[at], 1e-9) + noise[at]))
            variance = np.maximum(variance - reductions[-1] ** 2, 1e-9)
    return chosen


def best(candidates: Candidates, count: int) -> list[int]:
    """Indices of the candidates with the highest means, best first, whether available or not."""
    return highest(candidates.values[0], count)


def highest(values: Array, count: int) -> list[int]:
    """Indices of the largest values, largest first; ties in order."""
    return [int(index) for index in np.argsort(-np.round(values, DIGITS), kind="stable")[:count]]
