"""The privacy cost of selecting the best of many private runs.

Each run is mu-GDP, with independent noise. Three accounts:

1. All runs (or all their scores) are released: composition, mu sqrt(number of runs).
2. Only the best of K runs is released. K is random and secret, geometric with mean m; every run draws its configuration
   from a fixed set and has a private score (Koskela, Redberg and Wang 2024):
       eps' = e + 2 min_h log(exp(h) + (m - 1) delta(h)),   e such that delta(e) = delta / m,
   with delta(.) the privacy profile of one run.
3. The same by Renyi divergences (Papernot and Steinke 2022), computed by dp-accounting. It is usually slightly looser;
   where both hold, the smaller eps counts. It also covers other distributions of K, and several searches together.

A run returns its weights and its score: the fraction of correct validation rows plus Gaussian noise. A record is
either a train row or a validation row. A train row affects the score only through the private weights, a validation row
affects only the score. So a run with its score is mu-GDP with the larger mu of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trainables.errors import in_range
from trainables.privacy.gaussian import epsilon_of, log_delta, mu_of


def all_released(mu: float, runs: float, delta: float) -> float:
    """eps of releasing all of `runs` runs, each mu-GDP (account 1)."""
    return epsilon_of(mu * math.sqrt(runs), delta)


def best_released(mu: float, mean: float, delta: float) -> float:
    """eps of the best of a geometric number of mu-GDP runs (account 2)."""
    in_range(1, 1e9, mean=mean)
    if math.isinf(mu):
        return math.inf
    first = epsilon_of(mu, delta / mean)

    def second(h: float) -> float:
        return float(np.logaddexp(h, math.log(mean - 1) + log_delta(h, mu))) if mean > 1 else h

    from scipy.optimize import minimize_scalar  # takes half a second to import

    # decreases, then increases in h; beyond `first` delta(h) is negligible
    found = minimize_scalar(second, bounds=(0.0, first), method="bounded", options={"xatol": 1e-9})
    return first + 2 * min(second(float(found.x)), second(0.0))


def best_released_by_renyi(mu: float, mean: float, delta: float, shape: float = 1) -> float:
    """The same by Renyi divergences (account 3): also valid, usually slightly larger."""
    return _by_renyi([(mu, mean, shape)], delta)


def _by_renyi(searches: Sequence[tuple[float, float, float]], delta: float, beside: float = 0.0) -> float:
    """Each search is given as (mu of one run, mean number of runs, shape); `beside`: mu of other Gaussian releases."""
    from dp_accounting import dp_event
    from dp_accounting.rdp import rdp_privacy_accountant

    accountant = rdp_privacy_accountant.RdpAccountant(orders=np.concatenate([np.geomspace(1.01, 1000, 400), [2000.0]]))
    if beside:
        accountant.compose(dp_event.GaussianDpEvent(1 / beside))
    for mu, mean, shape in searches:
        accountant.compose(dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(1 / mu), mean=mean, shape=shape))
    return float(accountant.get_epsilon(delta))


def base_for(epsilon: float, mean: float, delta: float) -> float:
    """The eps of each run for which the best of a geometric number of runs is (`epsilon`, `delta`)-DP; rounded down."""
    low, high = 0.0, mu_of(epsilon, delta)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if best_released(middle, mean, delta) <= epsilon else (low, middle)
    base = epsilon_of(low, delta)
    while base > 0 and best_released(mu_of(base, delta), mean, delta) > epsilon:  # undo rounding errors
        base *= 1 - 1e-12
    return base


# ---- a search that releases its winner alone


@dataclass(frozen=True)
class Runs:
    """A distribution of K, the number of runs, on 1, 2, 3, ..."""

    shape: float
    """Shape of the truncated negative binomial distribution, as in dp-accounting and Papernot and Steinke."""
    sample: Callable[[np.random.Generator, float], Any]
    """Draws K, given a generator and the mean of K."""

    def draw(self, mean: float, seed: int) -> int:
        return int(self.sample(np.random.Generator(np.random.Philox(seed)), mean))


def _logarithmic(generator: np.random.Generator, mean: float) -> Any:
    """P(K = k) proportional to (1 - g)^k / k, with g such that (1/g - 1) / log(1/g) is the mean."""
    from scipy.optimize import brentq

    if mean <= 1:
        return 1
    inverse = math.exp(brentq(lambda log: math.expm1(log) / log - mean, 1e-9, 60.0))
    return generator.logseries(1 - 1 / inverse)


RUNS = {
    "geometric": Runs(1.0, lambda generator, mean: generator.geometric(1 / mean)),
    "logarithmic": Runs(0.0, _logarithmic),
}


def private_search(mu: float, mean: float, delta: float, runs: str) -> float:
    """eps of the best of K mu-GDP runs, by the tightest valid account; `mean` of K, `runs` names its distribution."""
    in_range(1, 1e9, mean=mean)
    if math.isinf(mu):
        return math.inf
    if mu == 0:
        return 0.0
    if mean == 1:
        return epsilon_of(mu, delta)  # always exactly one run
    shape = RUNS[runs].shape
    by_renyi = best_released_by_renyi(mu, mean, delta, shape)
    return min(by_renyi, best_released(mu, mean, delta)) if shape == 1 else by_renyi


class Search(NamedTuple):
    """A search that releases its winner alone."""

    mu: float
    """mu of one run together with its score."""
    mean: float
    """Mean number of runs."""
    runs: str = "geometric"
    """Distribution of their number."""


def private_searches(searches: Sequence[Search], delta: float, beside: float = 0.0) -> float:
    """eps of several searches on the same records, and of Gaussian releases that are `beside`-GDP together."""
    if any(math.isinf(search.mu) for search in searches) or math.isinf(beside):
        return math.inf
    several = [search for search in searches if search.mu > 0 and search.mean > 1]
    single = math.hypot(beside, *(search.mu for search in searches if search.mean == 1))  # exactly one run each
    if not several:
        return epsilon_of(single, delta) if single else 0.0
    if len(several) == 1 and not single:
        return private_search(*several[0][:2], delta, several[0].runs)
    return _by_renyi([(mu, mean, RUNS[runs].shape) for mu, mean, runs in several], delta, single)


def score_std(epsilon: float, delta: float, rows: int, part: float) -> float:
    """Standard deviation of the noise on the fraction of correct rows, whose sensitivity is 1 / rows, such that the
    score is (part mu)-GDP, with mu that of the run's claimed eps."""
    return 0.0 if math.isinf(epsilon) else 1 / (rows * part * mu_of(epsilon, delta))


def with_score(actual: float, claimed: float, delta: float, part: float) -> float:
    """mu of a run of eps `actual` with a score calibrated for `claimed`: the larger of the two mu, because no record is
    both a train row and a validation row."""
    if math.isinf(actual) or math.isinf(claimed):
        return math.inf
    return max(mu_of(actual, delta) if actual > 0 else 0.0, part * mu_of(claimed, delta))
