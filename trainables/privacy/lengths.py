"""The typical length of a row, from a private histogram of the lengths of all rows.

A bin holds the lengths from a power of two to the next. Find the two neighbouring bins that together hold the most
rows, and of these the bin with more rows. The typical length is the mean over this bin and its two neighbours, on a
logarithmic scale, weighted by their rows. If the counts of the pair may be noise alone, the typical length is
sqrt(features) instead, the length of standardised features.
Features are scaled by a power of two (`factor_of`), which causes no rounding."""

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
STEP = 0.25
"""The base-2 logarithm of the typical length is rounded to a multiple of this."""
SURE = 3.0
"""The share of the two bins together must exceed this many standard deviations of its noise."""


def factor_of(length: float) -> float:
    """The power of two that brings a length closest to `TYPICAL`."""
    return 2.0 ** round(math.log2(TYPICAL / length))


def typical(
    shares: NDArray[np.float64], std: NDArray[np.float64], sizes: Sequence[int], users: bool, features: int
) -> NDArray[np.float32]:
    """The typical lengths that follow from noisy shares of rows, (noises, bins). `std`: of the noise that every client
    adds to its counts, or every user to its shares."""
    pairs = shares[:, :-1] + shares[:, 1:]
    pair_std = std * math.sqrt(2 * len(sizes)) / (len(sizes) if users else sum(sizes))
    found = pairs.max(axis=1) > SURE * pair_std
    chosen = zip(shares, pairs.argmax(axis=1), found, strict=True)
    lengths = [2.0 ** _exponent(of_bins, int(pair)) if sure else math.sqrt(features) for of_bins, pair, sure in chosen]
    return np.array(lengths, dtype=np.float32)


def _exponent(shares: NDArray[np.float64], pair: int) -> float:
    """The base-2 logarithm of the typical length, for a pair with a positive share. It is rounded so that lanes have
    few different lengths: clients compute the mean of their rows for each length."""
    largest = pair + int(shares[pair + 1] > shares[pair])
    below, above = max(0, largest - 1), min(BINS, largest + 2)
    weights = shares[below:above].clip(min=0)
    middle = float(weights @ (np.arange(below, above) + 0.5) / weights.sum())
    return LOWEST + round(middle / STEP) * STEP
