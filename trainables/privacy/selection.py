"""What choosing the best of many private runs costs.

Three prices, for runs that are each (eps, delta)-DP by a Gaussian mechanism and have noise of their own:

* all of them are released (or all their scores are seen): composition, mu times the root of their number;
* only the best is, of a secret and random number of runs K, geometric with mean m, each with a configuration drawn
  from a fixed set and a score that is private too: the privacy profile of Koskela, Redberg and Wang 2024,
      eps' = e + 2 min_h log(exp(h) + (m - 1) delta(h)),   delta(e) = delta / m,
  with delta(.) the profile of one run;
* the same by Renyi divergences, Papernot and Steinke 2022, through dp-accounting: a little more, and a cross-check.
"""

from __future__ import annotations

import math

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
    found = minimize_scalar(second, bounds=(0.0, max(first, 1e-6)), method="bounded", options={"xatol": 1e-9})
    return first + 2 * min(second(float(found.x)), second(0.0))


def best_released_by_renyi(mu: float, mean: float, delta: float) -> float:
    """The same by Renyi divergences: always valid too, mostly a little more."""
    from dp_accounting import dp_event
    from dp_accounting.rdp import rdp_privacy_accountant

    accountant = rdp_privacy_accountant.RdpAccountant(orders=np.concatenate([np.geomspace(1.01, 1000, 400), [2000.0]]))
    accountant.compose(dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(1 / mu), mean=mean, shape=1))
    return float(accountant.get_epsilon(delta))


def base_for(epsilon: float, mean: float, delta: float) -> float:
    """The eps at which every run must be trained for the best of them to be (eps, delta)-DP; rounded down."""
    low, high = 0.0, mu_of(epsilon, delta)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if best_released(middle, mean, delta) <= epsilon else (low, middle)
    base = epsilon_of(low, delta) if low > 0 else 0.0
    while base > 0 and best_released(mu_of(base, delta), mean, delta) > epsilon:  # what rounding has added
        base *= 1 - 1e-12
    return base
