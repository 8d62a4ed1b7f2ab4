"""The surface: the expected score at any configuration and noise, from the trials of all budgets of a method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from orchestrator.search.surface.gaussian_process import Data, GaussianProcess, Prior

Array = NDArray[np.float64]
SATURATION = 12.0
"""Points below the best at which differences stop to matter: the model resolves good configurations, not bad ones."""
NOISE_SCALE = 1.0
"""Median length scale of the noise, in decades."""
AXIS_SCALE = 0.5
"""Median length scale of an axis, relative to its range."""
ITERATIONS = 40
TRIAL_NOISE, TRIAL_ROWS = 0.7, 5000
"""Expected standard deviation of a score in percent, for this many validation rows."""
DOUBT = 0.1
"""Standard deviation half way between two budgets, relative to the difference of their scores."""
CAUTIOUS = 0.25
"""Part of the way between two budgets after which a configuration is as good as at the worse one."""
FLOOR = 0.01
"""Noise multipliers far below this count as no noise."""


def log_noise(multiplier: float) -> float:
    """The noise as the model sees it; defined without noise, too."""
    return math.log10(multiplier + FLOOR)


def trial_noise(validation_rows: int, percent: bool) -> float:
    """The expected standard deviation of a score, in points."""
    return TRIAL_NOISE * math.sqrt(TRIAL_ROWS / validation_rows) if percent else TRIAL_NOISE


@dataclass(frozen=True)
class Trial:
    """One result, as the model uses it."""

    point: Sequence[float]
    """Coordinates of the configuration."""
    noise: float
    """`log_noise` of the run."""
    seed: int
    budget: int
    """Number of the cell."""
    score: float | None
    """Larger is better. None: the trial diverged."""


class Expected(NamedTuple):
    """Scores of configurations at a budget."""

    score: Array
    deviation: Array
    cautious: Array
    """To choose by: one standard deviation below the score. Between two budgets, that at the budget where it is
    lower; close to one of them, its own score counts more and more."""


class Surface:
    """Fitted to the trials of all budgets."""

    def __init__(
        self,
        trials: Sequence[Trial],
        is_numeric: Sequence[bool],
        unit: float | None = None,
        deviation: float = TRIAL_NOISE,
    ) -> None:
        """`is_numeric`: by coordinate. `unit`: the size of a point; default: scores are scaled such that the median
        lies 10 points below the best. `deviation`: the expected one of a score, in points."""
        self.trials = trials
        points = np.array([trial.point for trial in trials], dtype=float).reshape(len(trials), -1)
        noise = np.array([trial.noise for trial in trials])
        self.centre = float(round(noise.mean(), 6))
        self._noise = noise - self.centre
        self._inputs = np.column_stack([self._noise, points])
        self._budgets = np.array([trial.budget for trial in trials])
        self._scores = np.array([math.nan if trial.score is None else trial.score for trial in trials])
        self.unit = unit or self._unit()
        self._best = self._best_by_noise()
        gap = np.where(np.isnan(self._scores), math.inf, (self._level(self._noise) - self._scores) / self.unit)
        self._values = _compressed(gap)
        prior = Prior.of([NOISE_SCALE, *[AXIS_SCALE] * points.shape[1]], [True, *is_numeric], deviation)
        first = GaussianProcess.fit(self._data(self._values), prior, ITERATIONS)
        smooth = first.mean(self._inputs, self._budgets)
        self.process = GaussianProcess(self._data(smooth), prior, first.parameters)

    def _unit(self) -> float:
        best = {b: np.nanmax(self._scores[self._budgets == b], initial=-math.inf) for b in set(self._budgets.tolist())}
        gaps = np.array([best[b] for b in self._budgets.tolist()]) - self._scores
        gaps = gaps[np.isfinite(gaps) & (gaps > 0)]
        return float(np.median(gaps)) / 10 if len(gaps) else 1.0

    def _best_by_noise(self) -> tuple[Array, Array]:
        """The best score of every budget, by noise. Runs of a budget have different noise if their rounds differ."""
        levels: dict[float, float] = {}
        for budget in sorted(set(self._budgets.tolist())):
            own = (self._budgets == budget) & ~np.isnan(self._scores)
            if own.any():
                at = round(float(np.median(self._noise[self._budgets == budget])), 6)
                levels[at] = max(levels.get(at, -math.inf), float(self._scores[own].max()))
        if not levels:
            levels = {0.0: 0.0}
        where = np.array(sorted(levels))
        return where, np.array([levels[at] for at in where.tolist()])

    @cached_property
    def _curve(self) -> PchipInterpolator | None:
        where, level = self._best
        return PchipInterpolator(where, level) if len(where) > 1 else None

    def _level(self, noise: Array) -> Array:
        """The best score seen at this noise, interpolated between the budgets and constant beyond them."""
        where, level = self._best
        if self._curve is None:
            return np.full(len(noise), level[0])
        return np.asarray(self._curve(np.clip(noise, where[0], where[-1])), dtype=float)

    def _data(self, values_for_gaps: Array) -> Data:
        return Data(
            self._inputs,
            self._values,
            self._noise,
            np.clip(-values_for_gaps / 10, 0, 1.5),
            np.array([trial.seed for trial in self.trials]),
            self._budgets,
        )

    def inputs(self, points: Array, noise: Array | float) -> Array:
        """The process's inputs for configurations at a noise."""
        return np.column_stack([np.broadcast_to(np.asarray(noise) - self.centre, len(points)), points])

    def values(self, points: Array, noise: Array | float, budget: int = -1) -> tuple[Array, Array]:
        """Mean and variance of the compressed score relative to the best: the order of configurations."""
        mean, variance, _ = self.process.predict(self.inputs(points, noise), np.full(len(points), budget))
        return mean, variance

    def scores(self, points: Array, noise: Array | float, budget: int = -1) -> tuple[Array, Array]:
        """Expected score and its standard deviation (of the mean over seeds, not of a single trial)."""
        mean, variance = self.values(points, noise, budget)
        at = np.broadcast_to(np.asarray(noise) - self.centre, len(points))
        gap = _expanded(mean)
        slope = np.exp(np.maximum(gap, 0) / SATURATION)
        return self._level(at) - self.unit * gap, self.unit * slope * np.sqrt(variance)

    def expected(self, points: Array, noise: Array | float, budget: int) -> Expected:
        """At a searched budget."""
        score, deviation = self.scores(points, noise, budget)
        return Expected(score, deviation, score - deviation)

    def between(self, points: Array, noise: float, searched: Mapping[int, float]) -> Expected:
        """At a noise between those of searched budgets (number and noise of each).

        Scores are interpolated between the budgets, configuration by configuration. The process alone can be far off
        there: a configuration that is the best at one budget may fail at the next one, and a steep decline has no
        length scale. One that is good at both neighbours is safe, because its score falls with the noise."""
        order = sorted(searched, key=searched.__getitem__)
        where = np.array([searched[number] for number in order])
        known = [self.expected(points, searched[number], number) for number in order]
        if len(order) == 1:
            return known[0]
        above = int(np.clip(np.searchsorted(where, noise), 1, len(order) - 1))
        share = float(np.clip((noise - where[above - 1]) / (where[above] - where[above - 1]), 0, 1))
        low, high = known[above - 1], known[above]
        inside = min(share, 1 - share)  # 0 at a searched budget
        of_trials = (1 - share) * low.deviation + share * high.deviation
        deviation = np.hypot(of_trials, 2 * inside * DOUBT * (low.score - high.score))
        curve = PchipInterpolator(where, np.array([own.score for own in known]), axis=0)
        at = float(np.clip(noise, where[0], where[-1]))
        caution, nearest = min(1.0, inside / CAUTIOUS), low if share < 0.5 else high
        cautious = caution * np.minimum(low.cautious, high.cautious) + (1 - caution) * nearest.cautious
        return Expected(np.asarray(curve(at)), deviation, cautious)


def _compressed(gap: Array) -> Array:
    """0 for the best, about -gap near it, never below -SATURATION."""
    return np.where(gap < 0, -gap, -SATURATION * (1 - np.exp(-np.maximum(gap, 0) / SATURATION)))


def _expanded(value: Array) -> Array:
    """The gap of a compressed value."""
    inside = np.maximum(1 + value / SATURATION, 1e-3)
    return np.where(value > 0, -value, -SATURATION * np.log(inside))
