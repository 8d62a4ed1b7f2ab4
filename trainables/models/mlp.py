"""A head with one hidden layer, for many lanes at a time.

    p = softmax(h W2),  h = (tanh(x W1), 1),  x with a constant 1 appended
    ||g_x||^2 = sum over layers of ||input||^2 ||error||^2

The gradient of a layer is (input)(error)^T, so clipping needs no per-example gradients in memory. `per_example.py` does
the same slowly for any loss, and tests compare the two. `c/mlp.c` is used for float32 on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainables.lazy import torch
from trainables.models import kernels, mlp_compiled
from trainables.models.centres import Sharing, for_any_centres
from trainables.models.clipping import factors_
from trainables.models.lanes import SHAPES, vector_to_blocks
from trainables.models.shard import Diagnostics, Shard
from trainables.privacy.noise import SERVER, Address

MAX_WIDTH = 4096  # for C: a tile of a wider head would not fit any cache


@dataclass(frozen=True)
class MLPHead:
    features: int
    hidden: int
    classes: int

    @property
    def blocks(self) -> tuple[int, ...]:
        return ((self.features + 1) * self.hidden, (self.hidden + 1) * self.classes)

    @property
    def dimension(self) -> int:
        return sum(self.blocks)

    @property
    def width(self) -> int:
        return self.hidden + self.classes

    def initial(self, seed: int) -> torch.Tensor:
        """Every layer ~ N(0, s^2), s = 0.5 sqrt(2 / (inputs + outputs)), as in the linear head."""
        drawn = torch.from_numpy(Address(seed, SERVER, 0, 0, "initial weights").normal(self.dimension))
        sides = ((self.features + 1, self.hidden), (self.hidden + 1, self.classes))
        scales = [0.5 * math.sqrt(2.0 / (rows + columns)) for rows, columns in sides]
        return drawn * torch.repeat_interleave(torch.tensor(scales), torch.tensor(self.blocks))

    def loss(self, weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of one example: the definition, for `per_example`."""
        W1, W2 = self._layers(weights)
        scores = torch.tanh(x @ W1) @ W2[:-1] + W2[-1]
        return torch.nn.functional.cross_entropy(scores, y)

    @for_any_centres
    def clipped_gradient_sum(
        self,
        shard: Shard,
        theta: torch.Tensor,
        clip: torch.Tensor,
        *,
        diagnose: bool = False,
        automatic: bool = False,
    ) -> tuple[torch.Tensor, Diagnostics | None]:
        if self._kernel(theta) == "compiled":
            return mlp_compiled.clipped_gradient_sum(shard, theta, clip, self._sizes, diagnose, automatic)
        shape, count = SHAPES[theta.device.type], theta.shape[-2]
        step, lanes = shape.rows(self.width, shard.clients), _block_lanes(count, theta.device.type)
        blocks = self._lane_blocks(theta if theta.dim() == 3 else theta.unsqueeze(0), lanes)
        clips = vector_to_blocks(clip, lanes)
        total = torch.zeros(blocks.shape[0], shard.clients, *blocks.shape[2:], dtype=torch.float64, device=theta.device)
        losses = torch.zeros(blocks.shape[0], shard.clients, lanes, dtype=theta.dtype, device=theta.device)
        clipped = torch.zeros_like(losses)
        for block, weights in enumerate(blocks):
            W1, W2 = self._layers(weights)
            into1, into2 = self._layers(total[block])
            back_through = W2[..., :-1, :].mT
            if blocks.shape[1] == 1 and _transposed_matmul_is_slow(theta.device.type):
                back_through = back_through.contiguous()
            for start in range(0, shard.rows, step):
                # (clients, lanes, rows, ...), x and y the same for all lanes
                x = shard.x[:, start : start + step].unsqueeze(1)
                y = shard.y[:, start : start + step].view(shard.clients, 1, -1, 1)
                norm = shard.norm[:, start : start + step].unsqueeze(1)
                real = torch.isfinite(norm)
                norm = norm.masked_fill(~real, 0)  # inf * 0 would be nan
                h = torch.tanh_(x @ W1)
                z = torch.matmul(h, W2[..., :-1, :]).add_(W2[..., -1:, :])
                label = y.expand(*z.shape[:-1], 1)
                if diagnose:
                    losses[block] += ((z.logsumexp(-1, keepdim=True) - z.gather(-1, label)) * real).sum((2, 3))
                error = z.softmax(-1)
                error.scatter_add_(-1, label, torch.full_like(label, -1, dtype=error.dtype))
                back = torch.matmul(error, back_through).mul_(1 - h * h)
                # norm first: the square of a small `back` may underflow
                of_first = (norm * back).square_().sum(-1, keepdim=True)
                of_second = (h.square().sum(-1, keepdim=True) + 1) * error.square().sum(-1, keepdim=True)
                whole = of_first.add_(of_second).sqrt_()
                factor = factors_(whole, clips[block].view(1, -1, 1, 1), automatic).mul_(real)
                if diagnose:
                    clipped[block] += ((factor < 1) & real).sum((2, 3))
                error *= factor
                back *= factor
                into1 += x.mT @ back
                into2[..., :-1, :] += h.mT @ error
                into2[..., -1, :] += error.sum(-2)
        gradient = total.movedim(0, 1).flatten(1, 2)[:, :count]
        if not diagnose:
            return gradient, None
        loss, cut = (part.movedim(0, 1).flatten(1)[:, :count] for part in (losses, clipped))
        return gradient, Diagnostics(loss, cut)

    def sharing(self, shard: Shard, theta: torch.Tensor) -> Sharing:
        """How lanes with different centres share rows."""
        return "constant" if self._kernel(theta) == "compiled" else "no"

    def scores(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        W1, W2 = self._layers(weights)
        return torch.tanh(x @ W1) @ W2[:-1] + W2[-1]

    def evaluate(self, shard: Shard, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A tie for the highest score counts as wrong, as in the linear head."""
        if self._kernel(theta) == "compiled":
            losses, right = mlp_compiled.evaluate(shard, theta, self._sizes)
            return losses * (math.log(2) / shard.rows), right
        shape, count = SHAPES[theta.device.type], theta.shape[0]
        step = shape.rows(self.width)
        blocks = self._lane_blocks(theta.unsqueeze(0), _block_lanes(count, theta.device.type))[:, 0]
        loss = torch.zeros(*blocks.shape[:2], dtype=theta.dtype, device=theta.device)
        correct = torch.zeros(*blocks.shape[:2], shard.rows, dtype=torch.bool, device=theta.device)
        for block, weights in enumerate(blocks):
            W1, W2 = self._layers(weights)
            for start in range(0, shard.rows, step):
                z = torch.tanh_(shard.x[:, start : start + step] @ W1) @ W2[..., :-1, :] + W2[..., -1:, :]
                label = shard.y[:, start : start + step].unsqueeze(-1).expand(*z.shape[:-1], 1)
                of_label = z.gather(-1, label)
                loss[block] += (z.logsumexp(-1, keepdim=True) - of_label).sum((1, 2))
                others = z.scatter(-1, label, -math.inf).amax(-1)
                correct[block, :, start : start + step] = of_label.squeeze(-1) > others
        return loss.flatten()[:count] / shard.rows, correct.flatten(0, 1)[:count]

    @property
    def _sizes(self) -> mlp_compiled.Sizes:
        return mlp_compiled.Sizes(self.features + 1, self.hidden, self.classes)

    def _kernel(self, theta: torch.Tensor) -> kernels.Kernel:
        """The C kernel is for float32 on a CPU only, and for heads up to `MAX_WIDTH`."""
        supported = theta.dtype == torch.float32 and theta.device.type == "cpu" and self.width <= MAX_WIDTH
        return kernels.chosen("cpu") if supported else "torch"

    def _layers(self, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """W1 and W2 as views of (..., d)."""
        first, second = weights.split(self.blocks, dim=-1)
        return (
            first.unflatten(-1, (self.features + 1, self.hidden)),
            second.unflatten(-1, (self.hidden + 1, self.classes)),
        )

    @staticmethod
    def _lane_blocks(theta: torch.Tensor, lanes: int) -> torch.Tensor:
        """(client, lane, d) as (block, client, lane, d), the last block padded with zeros."""
        clients, have, size = theta.shape
        padded = torch.zeros(clients, -(-have // lanes) * lanes, size, dtype=theta.dtype, device=theta.device)
        padded[:, :have] = theta
        return padded.unflatten(1, (-1, lanes)).movedim(1, 0)


def _transposed_matmul_is_slow(device: str) -> bool:
    """OpenBLAS multiplies by a transposed matrix 50 times slower. A contiguous copy gives the same bits if all clients
    have the same weights; otherwise, or with other libraries, it may not."""
    return device == "cpu" and not torch.backends.mkl.is_available()


def _block_lanes(count: int, device: str) -> int:
    """Lanes per block. A CPU multiplies the lanes' matrices one after the other, so their number changes no bits. Only
    a single matrix takes another code path, so a block has at least 2 lanes. On a GPU the number is fixed, because the
    algorithm depends on it."""
    most = SHAPES[device].lanes
    if device != "cpu":
        return most
    blocks = -(-count // most)
    return max(2, -(-count // blocks))
