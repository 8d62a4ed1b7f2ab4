"""The squared distance of the weights from those that simulated labels were drawn from."""

from __future__ import annotations

from trainables.metrics.base import BuiltIn


class SquaredError(BuiltIn):
    name = "squared_error"
    title = "squared error"
    percent = False
    lower_is_better = True
