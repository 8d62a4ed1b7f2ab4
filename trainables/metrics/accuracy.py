"""Accuracy: the share of rows that are classified correctly."""

from __future__ import annotations

from trainables.metrics.base import BuiltIn


class Accuracy(BuiltIn):
    name = "accuracy"
    title = "accuracy"
    row_influence = 100.0
