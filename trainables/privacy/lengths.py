"""The typical length of a row, from a private histogram of the lengths of all rows.

A bin holds the lengths from a power of two to the next. The typical length is in the middle of the two neighbouring
bins with the most rows. If noise may have produced these counts, it is that of standardised features instead:
sqrt(features). The factor of the features is a power of two, so that scaling rounds nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LOWEST, HIGHEST = -8, 16
"""Lengths below 2^LOWEST are in the first bin, those above 2^HIGHEST in the last."""
BINS = HIGHEST - LOWEST
TYPICAL = 8.0
"""The typical length after scaling: the packaged search spaces were made for such features."""
SURE = 3.0
"""The two bins together must exceed the noise by this many standard deviations."""


def factor_of(length: float) -> float:
    """The power of two that brings a length closest to `TYPICAL`."""
    return 2.0 ** round(math.log2(TYPICAL / length))


def declared_factors(length: float, lanes: int) -> NDArray[np.float32]:
    return np.full(lanes, factor_of(length), dtype=np.float32)


def factors(
    shares: NDArray[np.float64], std: NDArray[np.float64], sizes: Sequence[int], users: bool, features: int
) -> NDArray[np.float32]:
    """The factors that follow from noisy shares of rows, (noises, bins). `std`: of the noise that every client adds to
    its counts, or every user to its shares."""
    pairs = shares[:, :-1] + shares[:, 1:]
    pair_std = std * math.sqrt(2 * len(sizes)) / (len(sizes) if users else sum(sizes))
    best = pairs.argmax(axis=1)
    found = pairs.max(axis=1) > SURE * pair_std
    typical = np.where(found, 2.0 ** (LOWEST + best + 1), math.sqrt(features))
    return np.array([factor_of(length) for length in typical], dtype=np.float32)
