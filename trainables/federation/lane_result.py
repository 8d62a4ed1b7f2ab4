"""What becomes of the trials of a pack, lane by lane. Nothing here needs torch: whoever passes it on has none."""

from __future__ import annotations

from dataclasses import dataclass, field

METRICS = ("accuracy", "loss", "train_loss", "clipped_share", "signal_norm", "noise_norm")


@dataclass
class LaneResult:
    """What is known of a trial so far. `metrics` are by round; accuracy and shares are in percent. Where the truth is
    known there is also `squared_error`, the squared distance of the weights from it."""

    key: str
    state: str = "running"
    """running, done or diverged"""
    rounds: int = 0
    metrics: dict[str, dict[int, float]] = field(default_factory=lambda: {name: {} for name in METRICS})
    seconds: float = 0.0
    """The trial's share of the time its pack took."""
    correct: bytes = b""
    """Per-example correctness on the test set after the last round, as packed bits; empty in a search."""


@dataclass(frozen=True)
class Progress:
    """How a pack stands."""

    running: int
    computing_s: float
