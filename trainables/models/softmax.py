"""The linear softmax head, for many lanes at a time.

    g_x = x (p - y)^T,  ||g_x|| = ||x|| ||p - y||,  p = softmax(x^T W)

So clipping needs no per-example gradients: a clipped gradient sum is two matrix products and a few passes over a chunk
in cache, in torch, in `c/softmax.c` or in Triton. Exponentials are in base 2, which is faster: weights are scaled by
log2 e first. Sums over rows are returned in float64, because rounding a large float32 sum could reveal more about a row
than its clipped gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from trainables.lazy import torch
from trainables.models import kernels, residuals, softmax_compiled
from trainables.models.centres import FLOAT32_ROWS, Sharing, for_any_centres
from trainables.models.compiled import LOG2E
from trainables.models.lanes import SHAPES, add_tile_products, from_blocks, to_blocks, vector_to_blocks
from trainables.models.products import Products
from trainables.models.shard import Diagnostics, Shard
from trainables.privacy.noise import SERVER, Address

MAX_CLASSES = 1 << 15  # for C: a tile with more classes would not fit any cache
# one product on a GPU has at most GPU_COLUMNS columns, but at least GPU_LANES lanes: small packs need little padding
GPU_COLUMNS, GPU_LANES = 512, 16
# the clip is multiplied by this if factors are rounded, so that rounding makes no contribution longer than the clip
CLIP_MARGIN = 1 / (1 + 2**-8)


@dataclass(frozen=True)
class SoftmaxHead:
    features: int
    classes: int

    @property
    def rows(self) -> int:
        """q, the features and the constant."""
        return self.features + 1

    @property
    def dimension(self) -> int:
        return self.rows * self.classes

    @property
    def blocks(self) -> tuple[int, ...]:
        return (self.dimension,)

    @property
    def width(self) -> int:
        return self.classes

    def initial(self, seed: int) -> torch.Tensor:
        """W ~ N(0, s^2), s = 0.5 sqrt(2 / (q + c)), a function of the seed."""
        scale = 0.5 * math.sqrt(2.0 / (self.rows + self.classes))
        return torch.from_numpy(Address(seed, SERVER, 0, 0, "initial weights").normal(self.dimension)) * scale

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
        per_client = theta if theta.dim() == 3 else theta.unsqueeze(0)
        if shard.precision != "float32":
            clip = clip * CLIP_MARGIN
        kernel = self._kernel(theta)
        if kernel == "compiled" and shard.precision != "float32":
            kernel = "torch"
        clip_residuals: Callable[..., residuals.RowDiagnostics | None]
        if kernel == "triton":
            from trainables.models import softmax_triton

            if softmax_triton.fits(self.features, self.classes):
                return softmax_triton.clipped_gradient_sum(shard, per_client, clip, self.classes, diagnose, automatic)
            clip_residuals = softmax_triton.clip_residuals
        else:
            clip_residuals = residuals.clip_residuals
        if kernel == "compiled":
            return softmax_compiled.clipped_gradient_sum(
                shard, theta, clip, self.rows, self.classes, diagnose, automatic
            )
        c, shape = self.classes, SHAPES[theta.device.type]
        lanes, products = self._lanes_together(theta), Products(shard.precision)
        together, step = shape.chunk(self.width, shard.clients)
        whole = shard.padded
        weights = to_blocks(per_client * LOG2E, self.rows, c, lanes)
        weights = torch.nn.functional.pad(weights, (0, 0, 0, whole.shape[2] - self.rows))
        weights = weights.expand(-1, shard.clients, -1, -1)
        clips = vector_to_blocks(clip, lanes)
        norm_columns = vector_to_blocks(shard.norm_columns(theta.shape[-2]), lanes, padding=0)
        total = torch.zeros(weights.shape, dtype=torch.float64, device=theta.device)
        losses = torch.zeros(weights.shape[0], shard.clients, lanes, dtype=theta.dtype, device=theta.device)
        clipped = torch.zeros_like(losses)
        logits = torch.empty(together, min(step, shard.rows), c * lanes, dtype=theta.dtype, device=theta.device)
        for block, first in itertools.product(range(weights.shape[0]), range(0, shard.clients, together)):
            some = slice(first, first + together)
            factors = products.rounded(weights[block, some])
            for start in range(0, shard.rows, step):
                rows = slice(start, min(start + step, shard.rows))
                x = products.rounded(whole[some, rows])
                n = x.shape[1]
                flat = products.of(x, factors, logits[: len(x), :n])
                diagnostics = clip_residuals(
                    flat.view(-1, n, c, lanes),
                    shard.y[some, rows],
                    shard.block_norms(some, rows, norm_columns[block]),
                    clips[block],
                    diagnose=diagnose,
                    automatic=automatic,
                )
                if diagnostics is not None:
                    losses[block, some] += diagnostics.loss.sum(1)
                    clipped[block, some] += diagnostics.clipped.sum(1)
                if shard.centres is None:
                    total[block, some] += products.of(x.mT, products.rounded(flat))
                else:
                    add_tile_products(total[block, some], x, flat, FLOAT32_ROWS)
        count = theta.shape[-2]
        gradient = from_blocks(total[:, :, : self.rows], c, lanes, count)
        if not diagnose:
            return gradient, None
        loss, cut = (part.movedim(0, 1).reshape(shard.clients, -1)[:, :count] for part in (losses, clipped))
        return gradient, Diagnostics(loss * math.log(2), cut)

    def sharing(self, shard: Shard, theta: torch.Tensor) -> Sharing:
        """How lanes with different centres share rows."""
        if self._kernel(theta) == "triton":
            from trainables.models import softmax_triton

            if softmax_triton.fits(self.features, self.classes):
                return "kernel"
        return "constant" if shard.precision == "float32" else "no"

    def scores(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x @ weights.view(self.rows, self.classes)

    def evaluate(self, shard: Shard, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A tie for the highest score counts as wrong: collapsed weights (all zero) get no credit."""
        kernel = self._kernel(theta)
        if kernel == "triton":
            from trainables.models import softmax_triton

            if softmax_triton.fits(self.features, self.classes):
                losses, right = softmax_triton.evaluate(shard, theta, self.classes)
                return losses / shard.rows, right
        if kernel == "compiled":
            losses, right = softmax_compiled.evaluate(shard, theta, self.rows, self.classes)
            return losses * (math.log(2) / shard.rows), right
        c, shape = self.classes, SHAPES[theta.device.type]
        lanes, step, count = shape.lanes, shape.rows(self.width), theta.shape[0]
        weights = to_blocks(theta.unsqueeze(0) * LOG2E, self.rows, c, lanes)[:, 0]
        loss = torch.zeros(weights.shape[0], lanes, dtype=theta.dtype, device=theta.device)
        correct = torch.zeros(weights.shape[0], lanes, shard.rows, dtype=torch.bool, device=theta.device)
        for block in range(weights.shape[0]):
            for start in range(0, shard.rows, step):
                x = shard.x[0, start : start + step]
                n = x.shape[0]
                z = torch.mm(x, weights[block]).view(n, c, lanes)
                label = shard.y[0, start : start + n].view(n, 1, 1).expand(n, 1, lanes)
                z.sub_(z.amax(1, keepdim=True))
                of_label = z.gather(1, label)
                loss[block] += z.exp2().sum(1).log2_().sub_(of_label.squeeze(1)).sum(0)
                z.scatter_(1, label, -math.inf)
                correct[block, :, start : start + n] = (of_label.squeeze(1) > z.amax(1)).T
        return loss.flatten()[:count] * (math.log(2) / shard.rows), correct.view(-1, shard.rows)[:count]

    def _lanes_together(self, theta: torch.Tensor) -> int:
        """Lanes of one matrix product: a power of two."""
        most = SHAPES[theta.device.type].lanes
        fitting = 1 << (GPU_COLUMNS // self.classes).bit_length() >> 1
        return max(GPU_LANES, min(most, fitting)) if theta.is_cuda else most

    def _kernel(self, theta: torch.Tensor) -> kernels.Kernel:
        """The C and Triton kernels are for float32 only, and the C kernel for fewer than `MAX_CLASSES` classes."""
        device = theta.device.type
        supported = theta.dtype == torch.float32 and (device == "cuda" or self.classes < MAX_CLASSES)
        return kernels.chosen(device) if supported else "torch"
