"""Functions for metrics that rank rows by score: positions of tied scores, and the mean over the classes."""

from __future__ import annotations

from trainables.lazy import torch


def last_of_ties(values: torch.Tensor) -> torch.Tensor:
    """For every entry of `values` (rows, columns), the index of the last row with the same value in this column. Every
    column is sorted."""
    rows = values.shape[0]
    index = torch.arange(rows, device=values.device).unsqueeze(1).expand_as(values)
    ends = torch.ones_like(values, dtype=torch.bool)
    ends[:-1] = values[:-1] != values[1:]
    return torch.where(ends, index, rows).flip(0).cummin(0).values.flip(0)


def mean_of_classes(values: torch.Tensor, positives: torch.Tensor, rows: int) -> torch.Tensor:
    """Mean over the classes that have both positive and negative rows. With two classes, the value of class 1."""
    if len(values) == 2:
        values, positives = values[1:], positives[1:]
    defined = (positives > 0) & (positives < rows)
    return values[defined].mean()
