"""The mean of the loss that is trained on: cross-entropy, Poisson negative log-likelihood, or a plug-in's own."""

from __future__ import annotations

from trainables.metrics.base import BuiltIn


class Loss(BuiltIn):
    name = "loss"
    title = "loss"
    percent = False
    lower_is_better = True
