"""Clipped gradient sums of any model from per-example gradients, for models without a closed form.

A model only has to define the loss of one example. Time grows with rows x weights; memory is that of a chunk of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.func import grad_and_value, vmap

from trainables.models.clipping import clip_factors
from trainables.models.shard import Diagnostics, Shard

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Loss of one example: weights (d,), features with the constant 1 (q,), label () -> ()."""

CELLS = 1 << 24  # rows x weights of a chunk


def clipped_gradient_sum(
    loss: Loss, shard: Shard, theta: torch.Tensor, clip: torch.Tensor, *, automatic: bool = False
) -> tuple[torch.Tensor, Diagnostics]:
    """Like `Model.clipped_gradient_sum`, for a model with this loss; always with diagnostics."""
    per_client = theta if theta.dim() == 3 else theta.expand(shard.clients, *theta.shape)
    total = torch.zeros_like(per_client, dtype=torch.float64)
    losses = torch.zeros(per_client.shape[:2], dtype=theta.dtype, device=theta.device)
    clipped = torch.zeros_like(losses)
    gradients = vmap(grad_and_value(loss), in_dims=(None, 0, 0))
    step = max(1, CELLS // theta.shape[-1])
    for client in range(shard.clients):
        for lane in range(theta.shape[-2]):  # one at a time, so that a lane's result does not depend on the others
            for start in range(0, shard.rows, step):
                rows = slice(start, start + step)
                per_row, loss_of = gradients(per_client[client, lane], shard.x[client, rows], shard.y[client, rows])
                real = torch.isfinite(shard.norm[client, rows])
                factor = clip_factors(per_row, clip[lane], automatic)
                # not multiplied by 0: a loss may be nan for the zeros that pad a client
                total[client, lane] += torch.where(real, per_row * factor, 0.0).sum(0, dtype=torch.float64)
                losses[client, lane] += torch.where(real.squeeze(1), loss_of, 0.0).sum()
                clipped[client, lane] += ((factor < 1) & real).sum()
    return total, Diagnostics(losses, clipped)
