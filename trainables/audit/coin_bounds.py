"""Lower bounds on what one run reveals about the coins of its canaries.

* `fdp_mu_bound` (Mahloujifar, Melis and Chaudhuri 2025): from the number of correct guesses, for any mu-GDP mechanism.
  Let p_i be the probability of i correct guesses among g. Flipping the coin of a random canary turns i correct guesses
  into i - 1, so mu-GDP limits  sum_{i >= j} i p_i  by the blow-up of  sum_{i >= j} (g - i + 1) p_{i-1}  for every j.
  A number of correct guesses whose probability would have to be below 5% refutes mu.
* `gaussian_mu_bound`: for releases that are known up to the coins and Gaussian noise, from all scores. Let E be the
  effects of the canaries on all releases, in units of the planned noise, G = E^T E, and p = E^T (releases - what the
  known rows contribute) = b G u + k N(0, G), where u are the coins, k is the actual noise in units of the planned one,
  and b scales the effects. Then p - G u estimates k (chi-squared), and u^T p estimates b / k (noncentral t). Both
  bounds are exact in this model. Each gets half of the error probability. A canary has mu_i = 2 b sqrt(G_ii) / k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import nctdtrinc, ndtr, ndtri
from scipy.stats import chi2

LEVEL = 0.05  # error probability of a bound
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

    @property
    def mu(self) -> float:
        """mu of the most visible canary, with noise as planned."""
        return float(2 * np.sqrt(self.gram.diagonal().max()))

    def guesses(self) -> NDArray[np.float64]:
        """A score for every canary without knowing any coin: ridge regression."""
        return np.linalg.solve(self.gram + np.eye(len(self.gram)), self.projections).astype(np.float64)

    def gaussian_mu_bound(self) -> float:
        values, vectors = np.linalg.eigh(self.gram)
        kept = values > RANK_TOLERANCE * values.max()
        rank = int(kept.sum())
        if rank < 2:
            return 0.0
        roots = np.sqrt(values[kept])
        # in coordinates with independent noise: seen = b expected + k N(0, I)
        seen = vectors[:, kept].T @ self.projections / roots
        expected = vectors[:, kept].T @ self.coins.astype(np.float64) * roots
        unexplained = float(np.square(seen - expected).sum())
        least_inverse_noise = np.sqrt(chi2.ppf(LEVEL / 2, rank) / unexplained)
        length = float(np.linalg.norm(expected))
        slope = float(seen @ expected) / length**2
        spread = float(np.sqrt(np.square(seen - slope * expected).sum() / (rank - 1)))
        least_ratio = _noncentrality_bound(slope * length / spread, rank - 1) / length
        return self.mu * max(least_inverse_noise, least_ratio, 0.0)


def _noncentrality_bound(t: float, freedom: int) -> float:
    """The smallest noncentrality for which a t this large has probability `LEVEL` / 2."""
    found = float(nctdtrinc(freedom, 1 - LEVEL / 2, t))
    return found if t > 0 and np.isfinite(found) else 0.0
