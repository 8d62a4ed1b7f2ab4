"""Balanced accuracy: the mean over the classes of the share of their rows that are classified correctly."""

from __future__ import annotations

from trainables.lazy import torch
from trainables.metrics.base import Metric, Predictions


class BalancedAccuracy(Metric):
    name = "balanced_accuracy"
    title = "balanced accuracy"

    def compute(self, predictions: Predictions) -> torch.Tensor:
        rows = torch.bincount(predictions.labels, minlength=predictions.classes).double()
        correct = (predictions.better == 0).double()
        right = torch.bincount(predictions.labels, weights=correct, minlength=predictions.classes)
        present = rows > 0
        return 100 * (right[present] / rows[present]).mean()

    def of_guessing(self, classes: int) -> float:
        return 100 / classes
