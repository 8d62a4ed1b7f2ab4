"""Macro-F1: the mean over the classes of the harmonic mean of precision and recall."""

from __future__ import annotations

from trainables.lazy import torch
from trainables.metrics.base import Metric, Predictions


class MacroF1(Metric):
    name = "macro_f1"
    title = "macro-F1"

    def compute(self, predictions: Predictions) -> torch.Tensor:
        """The mean is over the classes that occur among the labels or the predictions."""
        labels, predicted, classes = predictions.labels, predictions.predicted, predictions.classes
        both = torch.bincount(labels[labels == predicted], minlength=classes).double()
        total = torch.bincount(labels, minlength=classes) + torch.bincount(predicted, minlength=classes)
        present = total > 0
        return 100 * (2 * both[present] / total[present]).mean()
