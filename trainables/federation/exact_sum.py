"""Sums that do not depend on the order of their terms.

A release is rounded to a multiple of 2^-34 and stored as a whole number in float64. Adding such numbers is exact while
the total stays below 2^53 / 2^34 = 524,288, far above any release that has not diverged: the mean is the same to the
last bit for any number of hosts. (Secure aggregation rounds to a grid for the same reason.)
"""

from __future__ import annotations

import torch

GRID = float(1 << 34)


def to_grid(values: torch.Tensor) -> torch.Tensor:
    return to_grid_(values.to(torch.float64, copy=True))


def to_grid_(values: torch.Tensor) -> torch.Tensor:
    """In place; `values` are float64."""
    return values.mul_(GRID).round_()


def from_grid(total: torch.Tensor) -> torch.Tensor:
    return total / GRID
