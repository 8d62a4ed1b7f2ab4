"""The mean loss of the model that is trained: the cross-entropy, or the Poisson negative log-likelihood for counts."""

from __future__ import annotations

from trainables.metrics.base import BuiltIn


class Loss(BuiltIn):
    name = "loss"
    title = "loss"
    percent = False
    lower_is_better = True
