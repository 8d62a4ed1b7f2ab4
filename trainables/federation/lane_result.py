"""Results of the trials of a pack, one per lane. Imports no torch, because the driver does not load torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

METRICS = ("accuracy", "loss", "train_loss", "clipped_share", "signal_norm", "noise_norm")


@dataclass
class LaneResult:
    """The result of a trial so far. Each of `metrics` maps a round to a value; accuracy and shares are in percent. For
    simulated data there is also `squared_error`, the squared distance of the weights from the true weights."""

    key: str
    state: str = "running"
    """running, done, diverged or failed"""
    rounds: int = 0
    metrics: dict[str, dict[int, float]] = field(default_factory=lambda: {name: {} for name in METRICS})
    seconds: float = 0.0
    """The trial's share of its pack's time."""
    correct: bytes = b""
    """Per-example correctness on the test set after the last round, as packed bits; empty in a search."""
    reason: str = ""
    """If the trial failed: the exception in the method or the model, as a sentence and a traceback."""


@dataclass(frozen=True)
class Progress:
    """The state of a pack."""

    running: int
    """Lanes that have not ended."""
    round: int
    """The last round that was computed."""
    computing_s: float
    """Seconds spent in rounds."""
    results: Any = ()
    """Once all lanes have ended: the `LaneResult` of every trial; pickled while it passes through Ray."""
