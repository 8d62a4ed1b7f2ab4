"""When a trained model is of little use. `train` and the reports of studies warn by the same rules."""

from __future__ import annotations

import math

NOISY = 1.05
"""Above this `noise_to_signal`, users are warned."""


def noise_to_signal(noise: float, signal: float, rounds: int) -> float:
    """The ratio of noise to signal over all rounds: the noise of T rounds adds up to sqrt(T) times that of one round,
    gradients to T times. `noise`, `signal`: their norms in one round. 0 if the signal is 0 or unknown."""
    return noise / (signal * math.sqrt(rounds)) if signal > 0 else 0.0


def least_useful_accuracy(largest: float, rows: int) -> float:
    """The accuracy of always predicting the largest class, plus two standard errors on `rows` test rows, in percent.
    `largest`: the share of that class, in percent."""
    share = largest / 100
    return largest + 200 * math.sqrt(share * (1 - share) / max(1, rows))
