"""Average precision: the area under the curve of precision against recall."""

from __future__ import annotations

from trainables.lazy import torch
from trainables.metrics.base import Metric, Predictions
from trainables.metrics.ranking import last_of_ties, mean_of_classes


class AveragePrecision(Metric):
    name = "average_precision"
    title = "average precision"

    def compute(self, predictions: Predictions) -> torch.Tensor:
        """The average precision of each class against the others, as a mean over the classes; with two classes, that of
        class 1. Rows are ranked by the probability of the class."""
        values, order = predictions.scores.softmax(1).sort(0, descending=True)
        positive = predictions.one_hot.gather(0, order).double()
        last = last_of_ties(values)
        precision = positive.cumsum(0).gather(0, last) / (last + 1)
        count = positive.sum(0)
        return 100 * mean_of_classes((precision * positive).sum(0) / count, count, len(values))
