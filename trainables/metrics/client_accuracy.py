"""Accuracy of the clients that are served worst."""

from __future__ import annotations

import math

from trainables.lazy import torch
from trainables.metrics.base import Metric, Predictions


def by_client(predictions: Predictions) -> torch.Tensor:
    """Accuracy of every client that has rows, ascending."""
    assert predictions.clients is not None
    rows = torch.bincount(predictions.clients).double()
    right = torch.bincount(predictions.clients, weights=(predictions.better == 0).double())
    return (100 * right[rows > 0] / rows[rows > 0]).sort().values


class WorstClientAccuracy(Metric):
    name = "worst_client_accuracy"
    title = "accuracy of the worst client"
    needs_clients = True

    def compute(self, predictions: Predictions) -> torch.Tensor:
        return by_client(predictions)[0]


class WorstDecileAccuracy(Metric):
    name = "worst_decile_accuracy"
    title = "accuracy of the worst tenth of the clients"
    needs_clients = True

    def compute(self, predictions: Predictions) -> torch.Tensor:
        """The mean accuracy of the tenth of the clients, rounded up, whose accuracy is lowest."""
        accuracies = by_client(predictions)
        return accuracies[: math.ceil(len(accuracies) / 10)].mean()
