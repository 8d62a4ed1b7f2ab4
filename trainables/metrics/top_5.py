"""Top-5 accuracy: the share of rows whose class is among the five with the highest scores."""

from __future__ import annotations

from trainables.lazy import torch
from trainables.metrics.base import Metric, Predictions


class Top5(Metric):
    name = "top_5"
    title = "top-5 accuracy"
    row_influence = 100.0

    def compute(self, predictions: Predictions) -> torch.Tensor:
        return 100 * (predictions.better < 5).double().mean()
