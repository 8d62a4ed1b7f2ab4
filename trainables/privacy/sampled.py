"""The account of releases over secret Poisson samples, by dp-accounting's privacy loss distributions.

Its discretisation is pessimistic: the eps is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

GRID = 1e-3  # largest step of the discretised loss; a tenth of it takes 10 times as long and changes the 4th digit
GRID_PER_LOSS = 0.2  # largest step, as a fraction of the std of one release's loss: errors add up over many releases
LEAST_SAMPLED_DELTA = 1e-12  # below this the truncated tails exceed delta
CLOSE = 1e-3  # a calibrated noise exceeds the least possible one by at most this fraction


@dataclass(frozen=True)
class Sampled:
    """`count` releases of a sum over a sample; every record is in the sample with probability `rate`."""

    count: int
    multiplier: float
    """Standard deviation of the noise divided by the bound on what one record contributes."""
    rate: float


@lru_cache(maxsize=4096)
def epsilon_of(releases: tuple[Sampled, ...], adjacency: str, delta: float) -> float:
    """eps of all releases together."""
    if any(release.multiplier == 0 for release in releases):
        return math.inf
    from dp_accounting import dp_event, privacy_accountant
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

    relations = privacy_accountant.NeighboringRelation
    relation = relations.REPLACE_ONE if adjacency == "replace-one" else relations.REPLACE_SPECIAL
    accountant = PLDAccountant(relation, value_discretization_interval=grid_for(releases))
    for release in releases:
        event = dp_event.GaussianDpEvent(release.multiplier)
        sampled = dp_event.PoissonSampledDpEvent(release.rate, event) if release.rate < 1 else event
        accountant.compose(dp_event.SelfComposedDpEvent(sampled, release.count))
    return float(accountant.get_epsilon(delta))


def grid_for(releases: Sequence[Sampled]) -> float:
    """The step of the discretised loss. One release's loss has a standard deviation of about rate / multiplier, and the
    step is at most GRID_PER_LOSS times that. It is rounded down to a power of two, so that slightly different noise is
    accounted on the same grid."""
    finest = min([GRID, *(GRID_PER_LOSS * r.rate / r.multiplier for r in releases if r.rate < 1)])
    return 2.0 ** math.floor(math.log2(finest))


def scaled_to(epsilon: float, releases: Sequence[Sampled], adjacency: str, delta: float) -> float:
    """A factor for all noise multipliers with which the releases cost at most eps. It exceeds the smallest such factor
    by at most CLOSE, relatively."""
    unit = releases[0].multiplier
    relative = tuple(replace(r, multiplier=r.multiplier / unit) for r in releases)
    return _scaled_to(epsilon, relative, adjacency, delta) / unit


@lru_cache(maxsize=4096)
def _scaled_to(epsilon: float, releases: tuple[Sampled, ...], adjacency: str, delta: float) -> float:
    def cost(scale: float) -> float:
        return epsilon_of(tuple(replace(r, multiplier=r.multiplier * scale) for r in releases), adjacency, delta)

    high = 1.0
    while cost(high) > epsilon:
        high *= 2
    low = high / 2
    while cost(low) <= epsilon:
        low, high = low / 2, low
    while high > low * (1 + CLOSE):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost(middle) <= epsilon else (middle, high)
    return high
