"""The shares of the budget that preprocessing gets if the study does not set them, from public numbers alone.

The more rows, the smaller the share that suffices:

- lengths of rows: two bins that together hold half of the rows must stand out from the noise;
- mean of the features: the noise vector must be a third as long as the bound on a row. A quarter of the
  budget is the limit: it adds 15% to the noise of all rounds. A mean that is mostly noise is shrunk, so that it does
  little harm (see `noisy_means`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from trainables.privacy.gaussian import mu_of
from trainables.privacy.lengths import SURE
from trainables.privacy.plan import PrivacySettings

LENGTHS_SHARE = 0.005, 0.15
"""Smallest and largest."""
CENTRE_SHARE = 0.05, 0.25
NOISE_OF_MEAN = 1 / 3


class Shares(NamedTuple):
    scale: float
    center: float


def shares(privacy: PrivacySettings, sizes: Sequence[int], features: int) -> Shares:
    """The shares of the lengths and of the mean. Public: the sizes of the clients, and the number of features."""
    mu = mu_of(privacy.epsilon, privacy.delta)
    if math.isinf(mu):
        return Shares(LENGTHS_SHARE[0], CENTRE_SHARE[0])
    clients, factor = len(sizes), privacy.adjacency_factor
    protected = sum(sizes) if privacy.level == "record" else clients
    visible = 1.0 if privacy.release == "local" else 1 / math.sqrt(clients)
    # standard deviation of the noise in a mean over all records or users, for sensitivity 1 and the whole budget
    noise = visible * math.sqrt(clients) / (mu * protected)
    lengths = (2 * SURE * math.sqrt(2 * factor) * noise) ** 2
    centre = (factor * math.sqrt(features) * noise / NOISE_OF_MEAN) ** 2
    return Shares(_within(LENGTHS_SHARE, lengths), _within(CENTRE_SHARE, centre))


def _within(limits: tuple[float, float], share: float) -> float:
    """The share within the limits, rounded up, so that studies that are almost the same have the same share."""
    low, high = limits
    return min(high, max(low, math.ceil(share * 1000) / 1000))
