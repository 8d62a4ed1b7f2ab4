"""A Gaussian process for scores of trials, fitted by maximum a posteriori estimation.

The covariance of two trials at inputs x, y (logarithm of the noise multiplier, and hyperparameters) is

    (a^2 + s^2 [same seed]) k(|A x - A y|) + b^2 [same budget] + c^2

with the Matern 5/2 function k and a lower triangular matrix A. A learns a length scale for every input and directions
in which inputs compensate each other, such as a larger learning rate for less noise. Trials with the same seed draw the
same noise, so their scores deviate together. Each score also has an independent error with the standard deviation
n exp(p u + q g), where u is the logarithm of the noise multiplier and g measures how far the score is below the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, lapack, solve_triangular
from scipy.optimize import minimize

Array = NDArray[np.float64]
CONSTANT = 10.0**2
"""c^2: the prior variance of the mean of all scores."""
JITTER = 1e-4
"""Added to the variance of every error, for numerical stability."""
SCALARS = 6
"""Parameters before those of A: log a, log n, p, q, log s, log b."""
DIGITS = 2
"""Fitted parameters are rounded, so that processors whose arithmetic differs in the last bits agree."""


@dataclass(frozen=True)
class Data:
    """Trials: their inputs and scores."""

    inputs: Array
    """One row per trial."""
    values: Array
    """The scores, relative to the best."""
    noise: Array
    """u of every trial."""
    gaps: Array
    """g of every trial."""
    seeds: NDArray[np.int64]
    budgets: NDArray[np.int64]


@dataclass(frozen=True)
class Prior:
    """Independent normal distributions of all parameters, in this order: the scalars as listed at `SCALARS`, the
    logarithms of the diagonal of A, the entries `off_diagonal` of A."""

    mean: Array
    deviation: Array
    off_diagonal: tuple[tuple[int, int], ...]
    """Entries (i, j) of A below the diagonal that may differ from 0. Their parameters are relative to A[j, j]."""

    @classmethod
    def of(cls, length_scales: Sequence[float], mixed: Sequence[bool], noise: float = 0.7) -> Prior:
        """`length_scales` and `noise` (the standard deviation of a score) are medians. `mixed`: which inputs may
        have off-diagonal entries in A."""
        count = len(length_scales)
        entries = tuple((i, j) for i in range(count) for j in range(i) if mixed[i] and mixed[j])
        scalars = [math.log(6.0), math.log(noise), 0.4, 0.3, math.log(0.5), math.log(0.4)]
        deviations = [0.5, 0.5, 0.4, 0.4, 0.5, 0.5]
        return cls(
            np.array([*scalars, *(-math.log(scale) for scale in length_scales), *[0.0] * len(entries)]),
            np.array([*deviations, *[0.8] * count, *[0.7] * len(entries)]),
            entries,
        )

    def matrix(self, parameters: Array) -> Array:
        """The matrix A."""
        count = len(parameters) - SCALARS - len(self.off_diagonal)
        matrix = np.diag(np.exp(parameters[SCALARS : SCALARS + count]))
        for (i, j), value in zip(self.off_diagonal, parameters[SCALARS + count :], strict=True):
            matrix[i, j] = value * matrix[j, j]
        return matrix


def matern(x: Array, y: Array) -> Array:
    """The Matern 5/2 function of the distances between rows."""
    scaled = _scaled_distances(x, y)
    value = scaled * scaled
    value /= 3
    value += scaled
    value += 1
    value *= np.exp(np.negative(scaled, out=scaled), out=scaled)
    return value


def matern_and_slope(x: Array, y: Array) -> tuple[Array, Array]:
    """The values of `matern` and their derivatives with respect to the squared distance."""
    scaled = _scaled_distances(x, y)
    decay = np.exp(-scaled)
    return (1 + scaled + scaled * scaled / 3) * decay, -(5 / 6) * (1 + scaled) * decay


def _scaled_distances(x: Array, y: Array) -> Array:
    """The distances between rows, times the square root of 5."""
    squared = (-2 * x) @ y.T
    squared += (x * x).sum(1)[:, None]
    squared += (y * y).sum(1)[None]
    squared *= 5
    return np.sqrt(np.maximum(squared, 0, out=squared), out=squared)


class GaussianProcess:
    """The posterior given trials, for fixed parameters."""

    def __init__(self, data: Data, prior: Prior, parameters: Array) -> None:
        self.data, self.prior, self.parameters = data, prior, parameters
        self._matrix = prior.matrix(parameters)
        self._mapped = data.inputs @ self._matrix.T
        covariance, _, _ = _covariance(data, parameters, self._mapped)
        self._factor = cholesky(covariance, lower=True, check_finite=False)
        self._weights = cho_solve((self._factor, True), data.values, check_finite=False)
        self._amplitude, self._budget = math.exp(2 * parameters[0]), math.exp(2 * parameters[5])

    @classmethod
    def fit(cls, data: Data, prior: Prior, iterations: int) -> GaussianProcess:
        """A process whose parameters maximise the posterior density."""
        found = minimize(
            _loss,
            prior.mean,
            args=(data, prior),
            jac=True,
            method="L-BFGS-B",
            bounds=list(zip(prior.mean - 4 * prior.deviation, prior.mean + 4 * prior.deviation, strict=True)),
            options={"maxiter": iterations, "maxcor": 20},
        )
        return cls(data, prior, np.round(found.x, DIGITS))

    def covariances(self, inputs: Array, budgets: NDArray[np.int64]) -> Array:
        """Covariances of the mean scores over seeds at these inputs with the scores of the trials."""
        found = matern(inputs @ self._matrix.T, self._mapped)
        found *= self._amplitude
        found += self._budget * (budgets[:, None] == self.data.budgets)
        found += CONSTANT
        return found

    def mean(self, inputs: Array, budgets: NDArray[np.int64]) -> Array:
        return self.covariances(inputs, budgets) @ self._weights

    def predict(self, inputs: Array, budgets: NDArray[np.int64]) -> tuple[Array, Array, Array]:
        """Means, variances and whitened covariances with the trials (a column per input). Budget -1: a budget
        without trials."""
        covariances = self.covariances(inputs, budgets)
        whitened = solve_triangular(self._factor, covariances.T, lower=True, check_finite=False)
        variance = self._amplitude + self._budget + CONSTANT - (whitened * whitened).sum(0)
        return covariances @ self._weights, np.maximum(variance, 1e-9), whitened

    def joint(self, inputs: Array, budgets: NDArray[np.int64]) -> tuple[Array, Array]:
        """Means and covariances of the mean scores over seeds at these inputs."""
        mean, _, whitened = self.predict(inputs, budgets)
        mapped = inputs @ self._matrix.T
        prior = self._amplitude * matern(mapped, mapped) + self._budget * _same(budgets) + CONSTANT
        return mean, prior - whitened.T @ whitened + JITTER * np.eye(len(inputs))


def noise_variance(parameters: Array, noise: Array, gaps: Array) -> Array:
    """Variances of the independent errors of scores. `noise` and `gaps`: u and g."""
    return np.exp(2 * (parameters[1] + parameters[2] * noise + parameters[3] * gaps)) + JITTER


def _covariance(data: Data, parameters: Array, mapped: Array) -> tuple[Array, Array, Array]:
    """Three matrices over pairs of trials: the covariances of their scores, the values of k, and the derivatives of the
    covariances with respect to the squared distance."""
    k, slope = matern_and_slope(mapped, mapped)
    factor = math.exp(2 * parameters[0]) + math.exp(2 * parameters[4]) * _same(data.seeds)
    covariance = factor * k + math.exp(2 * parameters[5]) * _same(data.budgets) + CONSTANT
    covariance[np.diag_indices(len(covariance))] += noise_variance(parameters, data.noise, data.gaps)
    return covariance, k, factor * slope


def _same(labels: NDArray[np.int64]) -> Array:
    return (labels[:, None] == labels[None]).astype(float)


def _loss(parameters: Array, data: Data, prior: Prior) -> tuple[float, Array]:
    """The negative logarithm of the posterior density, and its gradient."""
    matrix = prior.matrix(parameters)
    covariance, k, slope = _covariance(data, parameters, data.inputs @ matrix.T)
    factor = cholesky(covariance, lower=True, check_finite=False)
    weights = cho_solve((factor, True), data.values, check_finite=False)
    distance = (parameters - prior.mean) / prior.deviation
    value = 0.5 * data.values @ weights + np.log(np.diag(factor)).sum() + 0.5 * distance @ distance
    inverse, _ = lapack.dpotri(factor, lower=1)
    inverse = np.tril(inverse) + np.tril(inverse, -1).T
    sensitivity = 0.5 * (inverse - np.outer(weights, weights))  # derivative of the loss by each covariance
    gradient = np.zeros_like(parameters)
    of_k = sensitivity * k
    gradient[0] = 2 * math.exp(2 * parameters[0]) * of_k.sum()
    gradient[4] = 2 * math.exp(2 * parameters[4]) * (of_k * _same(data.seeds)).sum()
    gradient[5] = 2 * math.exp(2 * parameters[5]) * (sensitivity * _same(data.budgets)).sum()
    own = np.diag(sensitivity) * (noise_variance(parameters, data.noise, data.gaps) - JITTER)
    gradient[1:4] = 2 * own.sum(), 2 * (own * data.noise).sum(), 2 * (own * data.gaps).sum()
    # the squared distance is |A (x - y)|^2: its gradient needs the weighted sum of (x - y)(x - y)^T
    pairs, x = sensitivity * slope, data.inputs
    of_matrix = 4 * matrix @ (x.T @ (pairs.sum(1)[:, None] * x) - x.T @ pairs @ x)
    count = len(matrix)
    gradient[SCALARS : SCALARS + count] = np.diag(of_matrix) * np.diag(matrix)
    for number, (i, j) in enumerate(prior.off_diagonal, SCALARS + count):
        gradient[number] = of_matrix[i, j] * matrix[j, j]
        gradient[SCALARS + j] += of_matrix[i, j] * matrix[i, j]
    return float(value), gradient + distance / prior.deviation
