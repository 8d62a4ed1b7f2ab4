"""The noise in a private mean, and how much of the mean to keep.

A vector z with noise of a known standard deviation sigma per entry is on average longer than the mean it estimates.
The positive-part James-Stein estimator max(0, 1 - (p - 2) sigma^2 / |z|^2) z has a smaller expected squared error for
every mean with p > 2 entries. It is a function of what was released, so it costs no budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def std_of_mean(std: NDArray[np.float64], sizes: Sequence[int], users: bool) -> NDArray[np.float64]:
    """Standard deviation of the noise in a mean over all rows, if every client adds noise with `std` to its sum; or in
    a mean over all users, if every user adds it to its mean."""
    return std * math.sqrt(len(sizes)) / (len(sizes) if users else sum(sizes))


def shrunk(means: NDArray[np.float32], std: NDArray[np.float64]) -> NDArray[np.float32]:
    """The James-Stein estimates. `means`: (noises, entries). `std`: (noises,), of the noise in every entry."""
    kept = np.empty_like(means)
    for mean, noise, out in zip(means.astype(np.float64), std, kept, strict=True):
        squared = float((mean * mean).sum())
        expected = max(0, len(mean) - 2) * noise**2
        out[:] = mean * (1 - expected / squared) if squared > expected else 0
    return kept
