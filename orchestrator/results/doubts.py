"""When a trained model is of little use: what `train` and the reports of studies say is decided here."""

from __future__ import annotations

import math

NOISY = 1.05
"""Noise relative to the signal that is worth a sentence."""


def noise_to_signal(noise: float, signal: float, rounds: int) -> float:
    """Over all rounds: the noise of T rounds adds up to sqrt(T) times that of one, gradients to T times."""
    return noise / (signal * math.sqrt(rounds)) if signal > 0 else 0.0


def least_useful_accuracy(largest: float, rows: int) -> float:
    """The accuracy of always answering the largest class, and two standard errors on `rows` test rows. `largest`: the
    share of that class, in percent, as is the result."""
    share = largest / 100
    return largest + 200 * math.sqrt(share * (1 - share) / max(1, rows))
