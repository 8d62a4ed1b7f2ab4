"""What choosing the best of many private runs costs.

Three prices, for runs that are each (eps, delta)-DP by a Gaussian mechanism and have noise of their own:

* all of them are released (or all their scores are seen): composition, mu times the root of their number;
* only the best is, of a secret and random number of runs K, geometric with mean m, each with a configuration drawn
  from a fixed set and a score that is private too: the privacy profile of Koskela, Redberg and Wang 2024,
      eps' = e + 2 min_h log(exp(h) + (m - 1) delta(h)),   delta(e) = delta / m,
  with delta(.) the profile of one run;
* the same by Renyi divergences, Papernot and Steinke 2022, through dp-accounting: mostly a little more, and a
  cross-check. It also knows other distributions of K, and several such searches together.

A run's score is part of what it releases: the share of validation rows that are right, with Gaussian noise. A record
either trains or validates. One that trains moves the score only through the weights, which are private already; one
that validates moves nothing else. So a run with its score is as private as the weaker of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from trainables.errors import in_range
from trainables.privacy.gaussian import epsilon_of, log_delta, mu_of


def all_released(mu: float, runs: float, delta: float) -> float:
    """eps of so many runs of mu-GDP, every one of them seen."""
    return epsilon_of(mu * math.sqrt(runs), delta)


def best_released(mu: float, mean: float, delta: float) -> float:
    """eps of the best of a geometric number of runs of mu-GDP, by the privacy profile."""
    in_range(1, 1e9, mean=mean)
    if math.isinf(mu):
        return math.inf
    first = epsilon_of(mu, delta / mean)

    def second(h: float) -> float:
        return float(np.logaddexp(h, math.log(mean - 1) + log_delta(h, mu))) if mean > 1 else h

    # falls, then rises with h; beyond `first` delta(h) hardly counts any more
    found = minimize_scalar(second, bounds=(0.0, first), method="bounded", options={"xatol": 1e-9})
    return first + 2 * min(second(float(found.x)), second(0.0))


def best_released_by_renyi(mu: float, mean: float, delta: float, shape: float = 1) -> float:
    """The same by Renyi divergences: always valid too, mostly a little more."""
    return _by_renyi([(mu, mean)], delta, shape)


def _by_renyi(searches: Sequence[tuple[float, float]], delta: float, shape: float) -> float:
    from dp_accounting import dp_event
    from dp_accounting.rdp import rdp_privacy_accountant

    accountant = rdp_privacy_accountant.RdpAccountant(orders=np.concatenate([np.geomspace(1.01, 1000, 400), [2000.0]]))
    for mu, mean in searches:
        accountant.compose(dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(1 / mu), mean=mean, shape=shape))
    return float(accountant.get_epsilon(delta))


def base_for(epsilon: float, mean: float, delta: float) -> float:
    """The eps at which every run must be trained for the best of them to be (eps, delta)-DP; rounded down."""
    low, high = 0.0, mu_of(epsilon, delta)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if best_released(middle, mean, delta) <= epsilon else (low, middle)
    base = epsilon_of(low, delta)
    while base > 0 and best_released(mu_of(base, delta), mean, delta) > epsilon:  # what rounding has added
        base *= 1 - 1e-12
    return base


# ---- a search that releases its winner alone


@dataclass(frozen=True)
class Runs:
    """A distribution of the number of runs: never none, and any number is possible."""

    shape: float
    """As dp-accounting (and Papernot and Steinke) number the truncated negative binomial ones."""
    sample: Callable[[np.random.Generator, float], Any]

    def draw(self, mean: float, seed: int) -> int:
        return int(self.sample(np.random.Generator(np.random.Philox(seed)), mean))


def _logarithmic(generator: np.random.Generator, mean: float) -> Any:
    """P(k) proportional to (1 - g)^k / k, with the g for which (1/g - 1) / log(1/g) is the mean."""
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
    """eps of the best of so many runs of mu-GDP: by the tighter of the accounts that hold."""
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


def private_searches(searches: Sequence[tuple[float, float]], delta: float, runs: str) -> float:
    """eps of several such searches about the same records, each given as mu of a run and mean number of runs."""
    if any(math.isinf(mu) for mu, _ in searches):
        return math.inf
    several = [(mu, mean) for mu, mean in searches if mu > 0]
    if len(several) <= 1:
        return max((private_search(mu, mean, delta, runs) for mu, mean in several), default=0.0)
    return _by_renyi(several, delta, RUNS[runs].shape)


def score_std(epsilon: float, delta: float, rows: int, part: float) -> float:
    """Standard deviation of the noise on a share of so many rows that are right, one of which moves it by at most
    1 / rows: then the score is worth `part` of the mu that is claimed for the run."""
    return 0.0 if math.isinf(epsilon) else 1 / (rows * part * mu_of(epsilon, delta))


def with_score(actual: float, claimed: float, delta: float, part: float) -> float:
    """mu of a run that costs eps `actual` together with a score made for `claimed`: a record is in one of them."""
    if math.isinf(actual) or math.isinf(claimed):
        return math.inf
    return max(mu_of(actual, delta) if actual > 0 else 0.0, part * mu_of(claimed, delta))
