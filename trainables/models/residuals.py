"""Clipped residuals (p - y) f from logits, in place, in torch: for every device and dtype.

p are the probabilities, y the one-hot label, f the clipping factor. `c/residuals.h` does the same for float32 on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

from trainables.lazy import torch
from trainables.models.clipping import factors_

LEAST = -60.0
"""Powers below 2^-60 change no sum and are set to 0. Otherwise their squares could underflow and be missing from the
norm, and subnormal numbers would slow a CPU down."""


class RowDiagnostics(NamedTuple):
    """Loss and clipping per row and lane; 0 for padding rows."""

    loss: torch.Tensor
    """In base 2: log2 of the sum of powers minus the label's shifted logit."""
    clipped: torch.Tensor


def clip_residuals(
    z: torch.Tensor,
    y: torch.Tensor,
    row_norm: torch.Tensor,
    clip: torch.Tensor,
    diagnose: bool = False,
    automatic: bool = False,
) -> RowDiagnostics | None:
    """Replace logits by clipped residuals. `z` is (clients, rows, classes, lanes), logits in base 2; `y` (clients,
    rows), `row_norm` (clients, rows, 1 or lanes), `clip` (lanes,)."""
    label = y.view(*y.shape, 1, 1).expand(-1, -1, 1, z.shape[3])
    z.sub_(z.amax(2, keepdim=True))
    label_logits = z.gather(2, label).squeeze(2) if diagnose else None
    torch.threshold_(z, LEAST, -torch.inf)
    z.exp2_()
    inverse = z.gather(2, label).squeeze(2)
    z.scatter_(2, label, 0)
    others = z.sum(2)
    inverse.add_(others)
    sums = inverse.clone() if diagnose else None
    inverse.reciprocal_()
    # ||p - y||^2 = sum over the other classes of p_k^2 + (1 - p_y)^2, and 1 - p_y is the sum of these p_k:
    # without a subtraction, the norm is accurate even if p_y is close to 1
    norm = (z * z).sum(2).addcmul_(others, others)
    norm.sqrt_().mul_(inverse).mul_(row_norm)
    factors = factors_(norm, clip, automatic)
    z.scatter_(2, label, others.neg_().unsqueeze(2))
    z.mul_(inverse.mul_(factors).unsqueeze(2))
    if sums is None or label_logits is None:
        return None
    real = torch.isfinite(row_norm)
    return RowDiagnostics(sums.log2_().sub_(label_logits).mul_(real), (factors < 1) & real)
