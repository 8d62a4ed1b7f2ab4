"""Expected calibration error: how far the probabilities of predictions are from the share of correct ones."""

from __future__ import annotations

from trainables.lazy import torch
from trainables.metrics.base import Metric, Predictions

BINS = 15  # of equal width


class CalibrationError(Metric):
    name = "calibration_error"
    title = "expected calibration error"
    lower_is_better = True

    def compute(self, predictions: Predictions) -> torch.Tensor:
        confidence = predictions.scores.softmax(1).amax(1)
        correct = (predictions.predicted == predictions.labels).double()
        bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1  # a bin includes its upper end, not its lower
        gaps = torch.bincount(bins, weights=confidence - correct, minlength=BINS)
        return 100 * gaps.abs().sum() / len(bins)
