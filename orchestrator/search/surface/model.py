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
"""Limit, in points below the best, towards which scores are compressed: the model resolves good configurations better
than bad ones."""
NOISE_SCALE = 1.0
"""Prior median of the length scale of the noise, in decades."""
AXIS_SCALE = 0.5
"""Prior median of the length scale of an axis, relative to its range."""
ITERATIONS = 40
TRIAL_NOISE, TRIAL_ROWS = 0.7, 5000
"""Expected standard deviation of a score in points, and the number of validation rows to which it applies."""
DOUBT = 0.1
"""Standard deviation of the interpolation half way between two budgets, relative to the difference of their scores."""
CAUTIOUS = 0.25
"""Within this fraction of the distance to a budget, the score of that budget counts more."""
STEEP = 20.0
"""Difference between the scores at two budgets, in points, from which the lower one counts between them."""
FLOOR = 0.01
"""Noise multipliers far below this count as no noise."""


def log_noise(multiplier: float) -> float:
    """The model's input for a noise multiplier; finite for 0, too."""
    return math.log10(multiplier + FLOOR)


def trial_noise(validation_rows: int, percent: bool) -> float:
    """The expected standard deviation of a score, in points (percentage points if the metric is a percentage)."""
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
    """Number of the budget."""
    score: float | None
    """Larger is better. None: the trial diverged."""


class Expected(NamedTuple):
    """Scores of configurations at a budget."""

    score: Array
    deviation: Array
    cautious: Array
    """The value to choose by. At a searched budget: the score minus one standard deviation. Between two budgets: a
    value between the straight line through theirs and the lower of them; the more they differ, the nearer to that."""


class Surface:
    """The model, fitted to the trials of all budgets."""

    def __init__(
        self,
        trials: Sequence[Trial],
        is_numeric: Sequence[bool],
        unit: float | None = None,
        deviation: float = TRIAL_NOISE,
    ) -> None:
        """`is_numeric`: by coordinate. `unit`: the size of a point; default: such that the median gap to the best score
        of a budget is 10 points. `deviation`: the expected standard deviation of a score, in points."""
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
        smooth = first.mean(self._inputs, self._budgets)  # gaps then depend on expected scores, not on single trials
        self.process = GaussianProcess(self._data(smooth), prior, first.parameters)

    def _unit(self) -> float:
        """A tenth of the median gap to the best score of the same budget."""
        best = {b: np.nanmax(self._scores[self._budgets == b], initial=-math.inf) for b in set(self._budgets.tolist())}
        gaps = np.array([best[b] for b in self._budgets.tolist()]) - self._scores
        gaps = gaps[np.isfinite(gaps) & (gaps > 0)]
        return float(np.median(gaps)) / 10 if len(gaps) else 1.0

    def _best_by_noise(self) -> tuple[Array, Array]:
        """The median noise of every budget, ascending, and its best score. The noise differs within a budget if rounds
        differ."""
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
        """The best score as a function of the noise; None if there is only one noise."""
        where, level = self._best
        return PchipInterpolator(where, level) if len(where) > 1 else None

    def _level(self, noise: Array) -> Array:
        """The best score seen at this noise, interpolated between the budgets and constant beyond them."""
        where, level = self._best
        if self._curve is None:
            return np.full(len(noise), level[0])
        return np.asarray(self._curve(np.clip(noise, where[0], where[-1])), dtype=float)

    def _data(self, values_for_gaps: Array) -> Data:
        """The trials as input of the process. `values_for_gaps`: compressed scores from which their gaps g follow."""
        return Data(
            self._inputs,
            self._values,
            self._noise,
            np.clip(-values_for_gaps / 10, 0, 1.5),
            np.array([trial.seed for trial in self.trials]),
            self._budgets,
        )

    def inputs(self, points: Array, noise: Array | float) -> Array:
        """The inputs of the Gaussian process for configurations at a noise."""
        return np.column_stack([np.broadcast_to(np.asarray(noise) - self.centre, len(points)), points])

    def values(self, points: Array, noise: Array | float, budget: int = -1) -> tuple[Array, Array]:
        """Mean and variance of the compressed score relative to the best, by which configurations are ordered."""
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
        """Scores at a searched budget."""
        score, deviation = self.scores(points, noise, budget)
        return Expected(score, deviation, score - deviation)

    def between(self, points: Array, searched: Mapping[int, float]) -> Between:
        """Scores between searched budgets. `searched`: the noise of each budget, by its number."""
        order = sorted(searched, key=searched.__getitem__)
        known = tuple(self.expected(points, searched[number], number) for number in order)
        return Between(np.array([searched[number] for number in order]), known, self.unit)


@dataclass(frozen=True)
class Between:
    """Scores of configurations between searched budgets; beyond the outermost ones, the scores of the nearest.

    Scores are interpolated between the budgets, configuration by configuration. The process alone can be far off
    there: the best configuration at one budget may fail at the next one, and no length scale fits so steep a
    decline. A configuration that is good at both budgets is safe, because scores fall as the noise grows; one that
    is much worse at one of them may already be as bad between."""

    where: Array
    """The noise of the searched budgets, in ascending order."""
    known: tuple[Expected, ...]
    """The scores there."""
    unit: float
    """A point, in units of the score."""

    @cached_property
    def _curve(self) -> PchipInterpolator:
        return PchipInterpolator(self.where, np.array([own.score for own in self.known]), axis=0)

    def at(self, noise: float) -> Expected:
        if len(self.known) == 1:
            return self.known[0]
        where = self.where
        above = int(np.clip(np.searchsorted(where, noise), 1, len(where) - 1))
        share = float(np.clip((noise - where[above - 1]) / (where[above] - where[above - 1]), 0, 1))
        low, high = self.known[above - 1], self.known[above]
        inside = min(share, 1 - share)  # 0 at a searched budget
        of_trials = (1 - share) * low.deviation + share * high.deviation
        deviation = np.hypot(of_trials, 2 * inside * DOUBT * (low.score - high.score))
        line = (1 - share) * low.cautious + share * high.cautious
        decline = np.abs(low.cautious - high.cautious) / (STEEP * self.unit)
        caution = np.minimum(1, decline) * min(1.0, inside / CAUTIOUS)
        cautious = line + caution * (np.minimum(low.cautious, high.cautious) - line)
        return Expected(np.asarray(self._curve(float(np.clip(noise, where[0], where[-1])))), deviation, cautious)


def _compressed(gap: Array) -> Array:
    """The negative gap, compressed: 0 for the best, about -gap near it, never below -SATURATION."""
    return np.where(gap < 0, -gap, -SATURATION * (1 - np.exp(-np.maximum(gap, 0) / SATURATION)))


def _expanded(value: Array) -> Array:
    """The gap of a compressed value: the inverse of `_compressed`."""
    inside = np.maximum(1 + value / SATURATION, 1e-3)
    return np.where(value > 0, -value, -SATURATION * np.log(inside))
