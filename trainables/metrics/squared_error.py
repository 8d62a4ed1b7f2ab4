"""The squared distance of the weights from the true weights, with which labels were simulated."""

from __future__ import annotations

from trainables.metrics.base import BuiltIn


class SquaredError(BuiltIn):
    name = "squared_error"
    title = "squared error"
    percent = False
    lower_is_better = True
