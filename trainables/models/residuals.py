"""From logits to clipped residuals (p - y) * factor, in place, in torch: for every device and type.

`c/residuals.h` does the same for float32 on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

from trainables.lazy import torch
from trainables.models.clipping import factors_

LEAST = -60.0  # a power below 2^-60 changes no sum; as zero it cannot become a subnormal number either


class Seen(NamedTuple):
    """What diagnostics are made of, per row and lane: nothing of filling rows."""

    loss: torch.Tensor
    """To base 2: log2 of the sum of powers less the label's shifted logit."""
    clipped: torch.Tensor


def clip_residuals(
    z: torch.Tensor,
    y: torch.Tensor,
    row_norm: torch.Tensor,
    clip: torch.Tensor,
    diagnose: bool = False,
    automatic: bool = False,
) -> Seen | None:
    """`z` is (clients, rows, classes, lanes), logits to base 2; `y` (clients, rows), `row_norm` (clients, rows, 1),
    `clip` (lanes,)."""
    label = y.view(*y.shape, 1, 1).expand(-1, -1, 1, z.shape[3])
    z.sub_(z.amax(2, keepdim=True))
    label_logits = z.gather(2, label).squeeze(2) if diagnose else None
    if not z.is_cuda:  # a GPU does not stumble over subnormal numbers
        torch.threshold_(z, LEAST, -torch.inf)
    z.exp2_()
    inverse = z.gather(2, label).squeeze(2)
    z.scatter_(2, label, 0)
    others = z.sum(2)
    inverse.add_(others)
    sums = inverse.clone() if diagnose else None
    inverse.reciprocal_()
    # ||p - y||^2 = sum of p_k^2 over the other classes + (1 - p_y)^2, and 1 - p_y is the sum of those p_k:
    # no difference is taken, so the norm is right however sure the model is of the label
    norm = (z * z).sum(2).addcmul_(others, others)
    norm.sqrt_().mul_(inverse).mul_(row_norm)
    factors = factors_(norm, clip, automatic)
    z.scatter_(2, label, others.neg_().unsqueeze(2))
    z.mul_(inverse.mul_(factors).unsqueeze(2))
    if sums is None or label_logits is None:
        return None
    real = torch.isfinite(row_norm)
    return Seen(sums.log2_().sub_(label_logits).mul_(real), (factors < 1) & real)
