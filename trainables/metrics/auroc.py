"""AUROC: the probability that a row of a class has a higher score for this class than a row of another class."""

from __future__ import annotations

from trainables.lazy import torch
from trainables.metrics.base import Metric, Predictions
from trainables.metrics.ranking import last_of_ties, mean_of_classes


class AUROC(Metric):
    name = "auroc"
    title = "AUROC"

    def compute(self, predictions: Predictions) -> torch.Tensor:
        """The AUROC of each class against the others, as a mean over the classes. Rows are ranked by the probability of
        the class; a tie counts half."""
        values, order = predictions.scores.softmax(1).sort(0)
        positive = predictions.one_hot.gather(0, order).double()
        rows, count = len(values), positive.sum(0)
        last = last_of_ties(values)
        first = rows - 1 - last_of_ties(values.flip(0)).flip(0)
        ranks = (first + last).double() / 2 + 1
        wins = (ranks * positive).sum(0) - count * (count + 1) / 2
        return 100 * mean_of_classes(wins / (count * (rows - count)), count, rows)

    def of_guessing(self, classes: int) -> float:
        return 50.0
