"""Lower bounds on what one run reveals about the coins of its canaries.

* `epsilon_lower_bound` (Steinke, Nasr and Jagielski 2023, theorem 5.2): from the number of correct guesses, for any
  (eps, delta)-DP mechanism. Up to a term in delta, their number is stochastically dominated by a binomial one with
  success probability e^eps / (e^eps + 1).
* `fdp_mu_bound` (Mahloujifar, Melis and Chaudhuri 2025): from the number of correct guesses, for any mu-GDP mechanism.
  Let p_i be the probability of i correct guesses among g. Flipping the coin of a random canary turns i correct guesses
  into i - 1, so mu-GDP limits  sum_{i >= j} i p_i  by the blow-up of  sum_{i >= j} (g - i + 1) p_{i-1}  for every j.
  A number of correct guesses whose probability would have to be below 5% refutes mu.
* `gaussian_mu_bound`: for releases that are known up to the coins and Gaussian noise, from all scores. Let E be the
  effects of the canaries on all releases, in units of the planned noise, G = E^T E, and p = E^T (releases - what the
  known rows contribute) = b G u + k N(0, G), where u are the coins, k is the actual noise in units of the planned one,
  and b scales the effects. Then p - G u estimates k if b = 1 (chi-squared), and u^T p estimates b / k (noncentral t).
  Each bound gets half of the error probability. A canary has mu_i = 2 b sqrt(G_ii) / k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, ndtr, ndtri
from scipy.stats import binom, chi2

CONFIDENCE = 0.95
LEVEL = 1 - CONFIDENCE
SIMULATED_RUNS = 200  # to choose the number of guesses
GUESSED_FRACTIONS = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)  # of the canaries: those with the largest scores
LARGEST_MU = 100.0
RANK_TOLERANCE = 1e-6  # of the largest eigenvalue of G: directions below it carry rounding only


def is_refuted(mu: float, correct: int, guesses: int, canaries: int, level: float = LEVEL) -> bool:
    """Whether a mu-GDP run has this many correct guesses or more with probability below `level`."""
    right, wrong = level * correct / canaries, level * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        larger = max(wrong, float(ndtr(ndtri(right) - mu)))
        right, wrong = right + i / (guesses - i) * (larger - wrong), larger
    return right + wrong > guesses / canaries


def fdp_mu_bound(correct: int, guesses: int, canaries: int) -> float:
    """The largest mu that the guesses refute, to 1e-3."""
    if not is_refuted(0.0, correct, guesses, canaries):
        return 0.0
    low, high = 0.0, 1.0
    while is_refuted(high, correct, guesses, canaries):
        low, high = high, 2 * high
        if high > LARGEST_MU:
            return low
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle, correct, guesses, canaries) else (low, middle)
    return low


@dataclass(frozen=True)
class CoinScores:
    """What the releases say about the coins: the normal equations of a regression on the canaries' effects."""

    gram: NDArray[np.float64]
    """G, for noise as planned."""
    projections: NDArray[np.float64]
    """p."""
    coins: NDArray[np.int64]
    """u."""
    groups: NDArray[np.int64]
    """The group of each canary. Canaries of different groups are in different releases, so G is 0 between them."""

    @property
    def mu(self) -> float:
        """mu of the most visible canary, with noise as planned."""
        return float(2 * np.sqrt(self.gram.diagonal().max()))

    def guesses(self) -> NDArray[np.float64]:
        """A score for every canary without knowing any coin: ridge regression."""
        found = np.empty(len(self.coins))
        for own, gram in self._parts():
            found[own] = np.linalg.solve(gram + np.eye(len(gram)), self.projections[own])
        return found

    def _parts(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        for group in np.unique(self.groups):
            own = np.flatnonzero(self.groups == group)
            yield own, self.gram[np.ix_(own, own)]

    def gaussian_mu_bound(self) -> float:
        pairs = [self._independent(own, gram) for own, gram in self._parts()]
        seen, expected = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        rank = len(seen)
        if rank < 2:
            return 0.0
        unexplained = float(np.square(seen - expected).sum())
        least_inverse_noise = np.sqrt(chi2.ppf(LEVEL / 2, rank) / unexplained)
        length = float(np.linalg.norm(expected))
        slope = float(seen @ expected) / length**2
        spread = float(np.sqrt(np.square(seen - slope * expected).sum() / (rank - 1)))
        least_ratio = _noncentrality_bound(slope * length / spread, rank - 1) / length
        return float(self.mu * max(least_inverse_noise, least_ratio, 0.0))

    def _independent(
        self, own: NDArray[np.int64], gram: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Observed and expected scores, in coordinates with independent noise: seen = b expected + k N(0, I)."""
        values, vectors = np.linalg.eigh(gram)
        kept = values > RANK_TOLERANCE * max(float(values.max()), 1e-300)
        roots = np.sqrt(values[kept])
        seen = vectors[:, kept].T @ self.projections[own] / roots
        return seen, vectors[:, kept].T @ self.coins[own].astype(np.float64) * roots


def _noncentrality_bound(t: float, freedom: int) -> float:
    """The smallest noncentrality for which a t this large has probability `LEVEL` / 2, by the normal approximation of
    the noncentral t distribution (Abramowitz and Stegun 26.7.10); its coverage is tested by simulation."""
    return t * (1 - 1 / (4 * freedom)) + float(ndtri(LEVEL / 2)) * float(np.sqrt(1 + t * t / (2 * freedom)))


def ratio_bound(seen: NDArray[np.float64], coins: NDArray[np.float64]) -> tuple[float, float]:
    """For seen = a + b coins + k N(0, 1) with unknown a, b and k: a lower bound on b / k, and an estimate of it. The
    bound fails with probability `LEVEL` / 2."""
    centred, freedom = coins - coins.mean(), len(coins) - 2
    length = float(np.linalg.norm(centred))
    slope = float(seen @ centred) / length**2
    spread = float(np.sqrt(np.square(seen - seen.mean() - slope * centred).sum() / freedom))
    if spread == 0:
        return (LARGEST_MU, LARGEST_MU) if slope > 0 else (0.0, 0.0)
    return _noncentrality_bound(slope * length / spread, freedom) / length, slope / spread


def detectable_ratio(canaries: int) -> float:
    """The fraction of the noise at which the Gaussian bound exceeds the mu of the full noise with probability
    `CONFIDENCE`, if all canaries can be told apart."""
    return float(np.sqrt(chi2.ppf(LEVEL / 2, canaries) / chi2.ppf(CONFIDENCE, canaries)))


def best_guess_count(mu: float, canaries: int) -> int:
    """The number of guesses that gives the best f-DP bound for independent canaries of this mu, simulated with a fixed
    seed. It does not depend on the data."""
    scores = np.random.default_rng(0).standard_normal((SIMULATED_RUNS, canaries)) + mu / 2
    largest_first = np.take_along_axis(scores, np.argsort(-np.abs(scores), axis=1), axis=1) > 0
    correct = largest_first.cumsum(1).mean(0)
    counts = sorted({max(1, round(fraction * canaries)) for fraction in GUESSED_FRACTIONS})
    return max(counts, key=lambda count: fdp_mu_bound(int(correct[count - 1]), count, canaries))


def tail_probability(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Upper bound on the probability of this many correct guesses or more in an (eps, delta)-DP run (theorem 5.2)."""
    coin = float(expit(epsilon))
    below = binom.pmf(
        np.arange(correct - 1, -1, -1), guesses, coin
    ).cumsum()  # P(correct - i <= number < correct), i = 1, 2, ...
    alpha = float((below / np.arange(1, correct + 1)).max(initial=0.0))
    return min(1.0, float(binom.sf(correct - 1, guesses, coin)) + alpha * delta * 2 * canaries)


def epsilon_lower_bound(canaries: int, guesses: int, correct: int, delta: float) -> float:
    """The largest eps that these guesses refute."""
    level = LEVEL
    if tail_probability(canaries, guesses, correct, 0.0, delta) > level:
        return 0.0
    low, high = 0.0, 1.0
    while tail_probability(canaries, guesses, correct, high, delta) <= level:
        low, high = high, 2 * high
        if high > 1e3:
            return low
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if tail_probability(canaries, guesses, correct, middle, delta) <= level else (low, middle)
        )
    return low
