"""The softmax head in C: what `softmax.c` is given, and what it gives back.

Lanes go in wide blocks of LANES; a few that are left over go one by one in the narrow layout, which pays for no others.
The bits of a lane are the same in either.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

from trainables.later import torch
from trainables.models import kernels
from trainables.models.kernels import LANES, TILE
from trainables.models.lanes import from_blocks, to_blocks, vector_to_blocks
from trainables.models.shard import Diagnostics, Shard

LONE = 5  # so many lanes cost less one by one than in a block of LANES


@dataclass(frozen=True)
class Layout:
    """Some lanes, and how they lie in memory."""

    lanes: slice
    wide: bool
    classes: int

    @property
    def columns(self) -> int:
        if self.wide:
            return self.classes * LANES
        width = _library().vector_width()
        return -(-self.classes // width) * width

    def weights(self, theta: torch.Tensor, rows: int) -> torch.Tensor:
        """(clients, lanes, d) as (blocks, clients, rows, columns)."""
        mine = theta[:, self.lanes]
        if self.wide:
            return to_blocks(mine, rows, self.classes, LANES)
        narrow = torch.zeros(mine.shape[1], mine.shape[0], rows, self.columns)
        narrow[..., : self.classes] = mine.movedim(1, 0).unflatten(2, (rows, self.classes))
        return narrow

    def gradient(self, total: torch.Tensor, count: int) -> torch.Tensor:
        """(blocks, clients, rows, columns) as (clients, lanes, d)."""
        if self.wide:
            return from_blocks(total, self.classes, LANES, count)
        return total[..., : self.classes].movedim(0, 1).flatten(2)

    def clips(self, clip: torch.Tensor) -> torch.Tensor:
        return vector_to_blocks(clip[self.lanes], LANES if self.wide else 1)

    def scratch(self) -> torch.Tensor:
        return torch.empty(TILE * self.columns + self.classes * LANES)


def layouts(lanes: int, classes: int) -> list[Layout]:
    """All of so many lanes: wide blocks, then what is left over."""
    left = lanes % LANES
    apart = left if left <= LONE else 0
    cut = ((slice(0, lanes - apart), True), (slice(lanes - apart, lanes), False))
    return [Layout(part, wide, classes) for part, wide in cut if part.stop > part.start]


def clipped_gradient_sum(
    shard: Shard, theta: torch.Tensor, clip: torch.Tensor, q: int, classes: int, diagnose: bool, automatic: bool = False
) -> tuple[torch.Tensor, Diagnostics | None]:
    """`theta` is (clients or one, lanes, d), for logits to base 2. The sum is (clients, lanes, d)."""
    clients, most = shard.clients, shard.rows
    _check("x", shard.x, torch.float32, (clients, most, q))
    _check("norm", shard.norm, torch.float32, (clients, most, 1))
    _check("y", shard.y, torch.int64, (clients, most))
    _check("real_rows", shard.real_rows, torch.int64, (clients,))
    _check("theta", theta, torch.float32, (theta.shape[0] if theta.shape[0] == clients else 1, *theta.shape[1:]))
    _check("clip", clip, torch.float32, theta.shape[1:2])
    _check_labels(shard, classes)
    sums, losses, cuts = [], [], []
    for layout in layouts(theta.shape[1], classes):
        weights, clips, scratch = layout.weights(theta, q), layout.clips(clip), layout.scratch()
        total = torch.zeros(len(weights), clients, q, layout.columns, dtype=torch.float64)
        seen = torch.empty(2, len(weights), clients, clips.shape[1], dtype=torch.float64)
        _library().gradient_sums(
            *(_place(part) for part in (shard.x, shard.norm, shard.y, shard.real_rows)),
            *(clients, most, q, classes, _place(weights), theta.shape[0] > 1, len(weights), layout.wide),
            *(_place(clips), automatic, _place(total), *(_place(part) if diagnose else None for part in seen)),
            _place(scratch),
        )
        count = layout.lanes.stop - layout.lanes.start
        sums.append(layout.gradient(total, count))
        loss, cut = (part.movedim(0, 1).reshape(clients, -1)[:, :count] for part in seen)
        losses.append(loss)
        cuts.append(cut)
    gradient = sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)
    if not diagnose:
        return gradient, None
    return gradient, Diagnostics((torch.cat(losses, dim=1) * math.log(2)).float(), torch.cat(cuts, dim=1).float())


def evaluate(shard: Shard, theta: torch.Tensor, q: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses to base 2 per lane, and whether each row is classified correctly."""
    _check("x", shard.x, torch.float32, (1, shard.rows, q))
    _check("y", shard.y, torch.int64, (1, shard.rows))
    _check("theta", theta, torch.float32, (1, *theta.shape[1:]))
    _check_labels(shard, classes)
    losses, rights = [], []
    for layout in layouts(theta.shape[1], classes):
        weights, scratch = layout.weights(theta, q), layout.scratch()
        loss = torch.empty(len(weights), LANES if layout.wide else 1, dtype=torch.float64)
        right = torch.empty(*loss.shape, shard.rows, dtype=torch.bool)
        _library().evaluation(
            *(_place(shard.x), _place(shard.y), shard.rows, q, classes, _place(weights), len(weights), layout.wide),
            *(_place(loss), _place(right), _place(scratch)),
        )
        count = layout.lanes.stop - layout.lanes.start
        losses.append(loss.flatten()[:count])
        rights.append(right.flatten(0, 1)[:count])
    return torch.cat(losses), torch.cat(rights)


def _library() -> ctypes.CDLL:
    found = kernels.library()
    if found is None:
        raise RuntimeError(f"{kernels.SOURCE.name} is not compiled")
    return found


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """C takes what it is pointed at for what it expects: a bound of another type would be no bound."""
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device.type != "cpu":
        raise TypeError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, not {dtype} {shape}")


def _check_labels(shard: Shard, classes: int) -> None:
    """A label is a place in memory there."""
    if shard.largest_label >= classes:
        raise ValueError(f"label {shard.largest_label} is none of {classes} classes")


def _place(tensor: torch.Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError("the compiled kernel wants neighbouring numbers")
    return tensor.data_ptr()
