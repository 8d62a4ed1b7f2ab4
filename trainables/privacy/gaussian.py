"""The Gaussian mechanism in closed form (Balle and Wang 2018; mu-GDP of Dong, Roth and Su 2022).

    mu = sqrt(sum over releases of (sensitivity / std)^2)
    delta(eps; mu) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)

Phi is the standard normal distribution function. Everything is computed in logarithms, which is accurate for eps from
1e-3 to 1e3, even if delta is below 1e-12.
"""

from __future__ import annotations

import math

from trainables.errors import UserError, in_range
from trainables.lazy import special
from trainables.privacy.roots import root as _root

SMALL_MU = 1e-3
# points in [-1, 1] and weights of three-point Gauss quadrature
GAUSS = ((-math.sqrt(0.6), 5 / 9), (0.0, 8 / 9), (math.sqrt(0.6), 5 / 9))


def log_delta(epsilon: float, mu: float) -> float:
    """log delta(eps; mu); -inf if delta is 0 in float64."""
    if mu == 0:
        return -math.inf
    if math.isinf(mu):
        return 0.0
    if mu < SMALL_MU:
        return _log_delta_of_small(epsilon, mu)
    first = float(special.log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(special.log_ndtr(-mu / 2 - epsilon / mu))
    if second >= first:  # float64 cannot tell the difference from 0
        return -math.inf
    return first + math.log(-math.expm1(second - first))


def _log_delta_of_small(epsilon: float, mu: float) -> float:
    """For small mu, where the two terms nearly cancel and the result would depend on the processor's rounding.

    With R = Phi / phi and a = mu/2 - eps/mu,  delta = phi(a) (R(a) - R(a - mu)) = phi(a) times the integral of
    R'(x) = 1 + x R(x) over [a - mu, a]. R' >= 0, so three-point Gauss quadrature adds without cancellation."""
    a = mu / 2 - epsilon / mu
    inside = math.fsum(weight * _slope(a - mu * (1 - point) / 2) for point, weight in GAUSS) * mu / 2
    return -a * a / 2 - math.log(2 * math.pi) / 2 + math.log(inside) if inside > 0 else -math.inf


def _slope(x: float) -> float:
    """R'(x) = 1 + x R(x), R = Phi / phi."""
    if x < -1000:
        return (1 - 3 / x / x) / x / x
    return 1 + x * math.sqrt(math.pi / 2) * float(special.erfcx(-x / math.sqrt(2)))


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest eps for which mu-GDP implies (eps, delta)-DP, rounded up."""
    in_range(0, 1, "()", delta=delta)
    in_range(0, math.inf, mu=mu)
    target = math.log(delta)
    if math.isinf(mu):
        return math.inf
    if log_delta(0.0, mu) <= target:
        return 0.0
    high = 1.0
    while log_delta(high, mu) > target:
        high *= 2
    root = _root(lambda e: max(log_delta(e, mu), -1e6) - target, 0.0, high)
    step = 1e-15
    while log_delta(root, mu) > target:  # growing steps: fixed ones might not end where rounding dominates
        root, step = math.nextafter(root * (1 + step), math.inf), min(2 * step, 0.5)
    return root


def mu_of(epsilon: float, delta: float) -> float:
    """The largest mu for which mu-GDP implies (eps, delta)-DP, rounded down; infinite if eps is."""
    in_range(0, 1, "()", delta=delta)
    in_range(0, math.inf, "(]", epsilon=epsilon)
    if math.isinf(epsilon):
        return math.inf
    target = math.log(delta)
    low, high = 1.0, 1.0
    while log_delta(epsilon, high) <= target:
        high *= 2
    while log_delta(epsilon, low) > target:
        low /= 2
    root = _root(lambda m: max(log_delta(epsilon, m), -1e6) - target, low, high)
    step = 1e-15
    while log_delta(epsilon, root) > target:
        root, step = root * (1 - step), min(2 * step, 0.5)
    return root


def least_false_negatives(mu: float, false_positives: float) -> float:
    """The trade-off curve of mu-GDP: the smallest false-negative rate of any test that tells two neighbouring data sets
    apart with this false-positive rate, Phi(Phi^-1(1 - alpha) - mu)."""
    in_range(0, 1, false_positives=false_positives)
    return float(special.ndtr(special.ndtri(1 - false_positives) - mu))


def budget(epsilon: float | None, mu: float | None, delta: float) -> float:
    """The eps of a budget given as epsilon or as mu."""
    if mu is not None:
        if epsilon is not None:
            raise UserError(f"epsilon = {epsilon:g} and mu = {mu:g} state the budget twice")
        in_range(0, math.inf, "(]", mu=mu)
        return epsilon_of(mu, delta)
    if epsilon is None:
        raise UserError("the budget is missing; state it with --epsilon or --mu")
    return epsilon
