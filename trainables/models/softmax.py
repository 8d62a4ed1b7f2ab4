"""The softmax linear head, many lanes at a time.

A per-example gradient is x (p - y)^T, so its norm is ||x|| * ||p - y||, and ||p - y||^2 = sum p^2 - 2 p_y + 1: clipping
needs no per-example gradient. Everything else is two matrix products and a handful of passes over a chunk in cache.
Exponentials are taken to base 2 (the weights are scaled by log2 e beforehand), which is the faster instruction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.models.lanes import SHAPES, from_blocks, to_blocks, vector_to_blocks
from trainables.privacy.noise import SERVER, Address

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Shard:
    """Rows resident on a device: features with the constant 1 appended, their norms, and labels."""

    x: torch.Tensor
    norm: torch.Tensor
    y: torch.Tensor

    @classmethod
    def build(
        cls,
        x: NDArray[np.float32],
        y: NDArray[np.int64],
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Shard:
        features = torch.from_numpy(np.ascontiguousarray(x)).to(device=device, dtype=dtype)
        ones = torch.ones(len(x), 1, dtype=dtype, device=device)
        with_constant = torch.cat([features, ones], dim=1)
        norm = torch.linalg.vector_norm(with_constant, dim=1, keepdim=True)
        return cls(with_constant, norm, torch.from_numpy(np.ascontiguousarray(y)).to(device))

    @property
    def size(self) -> int:
        return self.x.shape[0]


@dataclass(frozen=True)
class Diagnostics:
    """What only the experimenter sees, sums over a shard, one number per lane. Not private, never a release."""

    loss: torch.Tensor
    clipped: torch.Tensor


@dataclass(frozen=True)
class SoftmaxHead:
    features: int
    classes: int

    @property
    def rows(self) -> int:
        """q: the features and the constant."""
        return self.features + 1

    @property
    def dimension(self) -> int:
        """d: how many weights a lane has."""
        return self.rows * self.classes

    def initial(self, seed: int) -> torch.Tensor:
        """W ~ N(0, s^2), s = 0.5 sqrt(2 / (q + c)), addressed by the seed."""
        scale = 0.5 * math.sqrt(2.0 / (self.rows + self.classes))
        return torch.from_numpy(Address(seed, SERVER, 0, 0, "initial weights").normal(self.dimension)) * scale

    def clipped_gradient_sum(
        self, shard: Shard, theta: torch.Tensor, clip: torch.Tensor, *, diagnose: bool = False
    ) -> tuple[torch.Tensor, Diagnostics | None]:
        """For every lane, the sum over the shard of per-example gradients clipped to l2 norm `clip`."""
        c, shape = self.classes, SHAPES[theta.device.type]
        lanes, step = shape.lanes, shape.rows(self.classes)
        weights = to_blocks(theta * LOG2E, self.rows, c, lanes)
        clips = vector_to_blocks(clip, lanes)
        total = torch.zeros_like(weights)
        losses, clipped = torch.zeros_like(clips), torch.zeros_like(clips)
        logits = torch.empty(min(step, shard.size), c * lanes, dtype=theta.dtype, device=theta.device)
        scratch = torch.empty_like(logits)
        for block in range(weights.shape[0]):
            for start in range(0, shard.size, step):
                x = shard.x[start : start + step]
                n = x.shape[0]
                flat = torch.mm(x, weights[block], out=logits[:n])
                z = flat.view(n, c, lanes)
                label = shard.y[start : start + n].view(n, 1, 1).expand(n, 1, lanes)
                z.sub_(z.amax(1, keepdim=True))
                shifted_label = z.gather(1, label).squeeze(1) if diagnose else None
                z.exp2_()
                inverse = z.sum(1)
                if shifted_label is not None:  # -ln p_y = ln 2 (log2 of the sum - shifted logit of the label)
                    losses[block] += inverse.log2().sub_(shifted_label).sum(0)
                inverse.reciprocal_()
                # ||p - y||^2 = sum p^2 - 2 p_y + 1, not below what float32 can tell from zero
                norm = torch.mul(z, z, out=scratch[:n].view(n, c, lanes)).sum(1).mul_(inverse).mul_(inverse)
                norm.sub_(z.gather(1, label).squeeze(1).mul_(inverse), alpha=2).add_(1).clamp_(min=1e-24)
                norm.sqrt_().mul_(shard.norm[start : start + n])
                factor = torch.div(clips[block], norm, out=norm).clamp_(max=1)
                if diagnose:
                    clipped[block] += (factor < 1).sum(0)
                # (p - y) * factor, in place of the logits
                z.mul_(inverse.mul_(factor).unsqueeze(1))
                z.scatter_add_(1, label, factor.neg_().unsqueeze(1))
                total[block].addmm_(x.t(), flat)
        gradient = from_blocks(total, c, lanes, theta.shape[0])
        if not diagnose:
            return gradient, None
        count = theta.shape[0]
        return gradient, Diagnostics(losses.flatten()[:count] * math.log(2), clipped.flatten()[:count])

    def evaluate(self, shard: Shard, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss per lane, and whether each row is classified correctly: (lanes,), (lanes, rows).

        A tie for the highest score counts as wrong: weights that have collapsed to zero earn nothing.
        """
        c, shape = self.classes, SHAPES[theta.device.type]
        lanes, step, count = shape.lanes, shape.rows(self.classes), theta.shape[0]
        weights = to_blocks(theta * LOG2E, self.rows, c, lanes)
        loss = torch.zeros(weights.shape[0], lanes, dtype=theta.dtype, device=theta.device)
        correct = torch.zeros(weights.shape[0], lanes, shard.size, dtype=torch.bool, device=theta.device)
        for block in range(weights.shape[0]):
            for start in range(0, shard.size, step):
                x = shard.x[start : start + step]
                n = x.shape[0]
                z = torch.mm(x, weights[block]).view(n, c, lanes)
                label = shard.y[start : start + n].view(n, 1, 1).expand(n, 1, lanes)
                z.sub_(z.amax(1, keepdim=True))
                of_label = z.gather(1, label)
                loss[block] += z.exp2().sum(1).log2_().sub_(of_label.squeeze(1)).sum(0)
                z.scatter_(1, label, -math.inf)
                correct[block, :, start : start + n] = (of_label.squeeze(1) > z.amax(1)).T
        return loss.flatten()[:count] * (math.log(2) / shard.size), correct.view(-1, shard.size)[:count]
