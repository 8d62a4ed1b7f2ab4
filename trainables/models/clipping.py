"""What brings a contribution to its bound C: a factor, by the contribution's norm.

Plain: min(1, C / norm). Automatic (Bu, Wang, Zha and Karypis 2023): C / (norm + 0.01), which stretches short ones, too,
so that the clip is one thing with the learning rate. Neither leaves anything longer than C: the account is the same.
"""

from __future__ import annotations

from trainables.lazy import torch

SOFTENING = 0.01  # so that what is next to nothing does not become C long


def factors_(norm: torch.Tensor, bound: torch.Tensor, automatic: bool = False) -> torch.Tensor:
    """In place of the norms."""
    if automatic:
        return torch.div(bound, norm.add_(SOFTENING), out=norm)
    return torch.div(bound, norm, out=norm).clamp_(max=1)
