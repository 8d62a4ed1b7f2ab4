"""The interface of a metric: how well a model predicts the rows that it is evaluated on.

A metric is a subclass of `Metric` with a name, in a file of its own in this package or in a plug-in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from trainables.lazy import torch


class Predictions(NamedTuple):
    """A model's scores for every row, with the true labels and the clients of the rows."""

    scores: torch.Tensor
    """(rows, classes), float64; higher for more likely classes. Their softmax gives the model's probabilities."""
    labels: torch.Tensor
    """(rows,), 0 to classes - 1."""
    clients: torch.Tensor | None
    """(rows,), the client of every row; None if the clients of these rows are not known."""

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.scores.shape[1]

    @property
    def predicted(self) -> torch.Tensor:
        """(rows,), the class with the highest score; the first among equals."""
        return self.scores.argmax(1)

    @property
    def one_hot(self) -> torch.Tensor:
        """(rows, classes), whether a row belongs to a class."""
        return torch.nn.functional.one_hot(self.labels, self.classes).bool()

    @property
    def better(self) -> torch.Tensor:
        """(rows,), the number of other classes whose score is at least that of the true class; 0 if the row is
        classified correctly. A tie counts against the model, so weights of zero get no credit."""
        of_label = self.scores.gather(1, self.labels.unsqueeze(1))
        return (self.scores >= of_label).sum(1) - 1


class Metric(ABC):
    """A measure of how well a model predicts the rows that it is evaluated on."""

    name: ClassVar[str]
    """Name in `objective` and `metrics` of a study file."""
    title: ClassVar[str]
    """Name in tables."""
    percent: ClassVar[bool] = True
    """Whether values are percentages."""
    lower_is_better: ClassVar[bool] = False
    """Whether a smaller value is better."""
    needs_clients: ClassVar[bool] = False
    """Whether it needs the client of every row."""
    row_influence: ClassVar[float | None] = None
    """By how much the metric of n rows can change if one row is replaced, times n; None if no such bound is known. A
    private search needs it to calibrate the noise on scores."""

    @abstractmethod
    def compute(self, predictions: Predictions) -> torch.Tensor:
        """A single number; nan where the metric is not defined."""

    def of_guessing(self, classes: int) -> float | None:
        """The value of a model that has learned nothing, if it is the same for all data."""
        return None


class BuiltIn(Metric):
    """A metric that the server computes in every evaluation, from the model's losses, predictions or weights. `compute`
    is not used."""

    def compute(self, predictions: Predictions) -> torch.Tensor:
        raise NotImplementedError
