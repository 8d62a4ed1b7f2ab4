"""Clipping factors, given a contribution's l2 norm and its bound C.

    plain:      min(1, C / norm)
    automatic:  C / (norm + 0.01)     (Bu, Wang, Zha and Karypis 2023)

Automatic clipping also scales short contributions up, so the clip acts as part of the learning rate. In both cases no
contribution is longer than C: the privacy account is the same.
"""

from __future__ import annotations

from trainables.lazy import torch

SOFTENING = 0.01  # keeps tiny contributions from being scaled up to C


def factors_(norm: torch.Tensor, bound: torch.Tensor, automatic: bool = False) -> torch.Tensor:
    """The factors, written over the norms."""
    if automatic:
        return torch.div(bound, norm.add_(SOFTENING), out=norm)
    return torch.div(bound, norm, out=norm).clamp_(max=1)
