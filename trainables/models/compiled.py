"""What the heads in C have in common: how lanes lie in memory, and what is handed over.

Lanes go in wide blocks of LANES; a few that are left over go one by one in the narrow layout, which pays for no others.
The bits of a lane are the same in either.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainables.later import torch
from trainables.models import kernels
from trainables.models.kernels import LANES
from trainables.models.lanes import from_blocks, to_blocks, vector_to_blocks
from trainables.models.shard import Diagnostics, Shard

LONE = 5  # so many lanes cost less one by one than in a block of LANES


@dataclass(frozen=True)
class Layout:
    """Some lanes, and how they lie in memory."""

    lanes: slice
    wide: bool
    outputs: int
    """Classes, or units of a hidden layer."""

    @property
    def columns(self) -> int:
        if self.wide:
            return self.outputs * LANES
        width = library().vector_width()
        return -(-self.outputs // width) * width

    def weights(self, theta: torch.Tensor, rows: int) -> torch.Tensor:
        """(clients, lanes, d) as (blocks, clients, rows, columns)."""
        mine = theta[:, self.lanes]
        if self.wide:
            return to_blocks(mine, rows, self.outputs, LANES)
        narrow = torch.zeros(mine.shape[1], mine.shape[0], rows, self.columns)
        narrow[..., : self.outputs] = mine.movedim(1, 0).unflatten(2, (rows, self.outputs))
        return narrow

    def gradient(self, total: torch.Tensor) -> torch.Tensor:
        """(blocks, clients, rows, columns) as (clients, lanes, d)."""
        if self.wide:
            return from_blocks(total, self.outputs, LANES, self.count)
        return total[..., : self.outputs].movedim(0, 1).flatten(2)

    @property
    def count(self) -> int:
        return self.lanes.stop - self.lanes.start

    @property
    def side_by_side(self) -> int:
        """Lanes of a block."""
        return LANES if self.wide else 1

    def clips(self, clip: torch.Tensor) -> torch.Tensor:
        return vector_to_blocks(clip[self.lanes], self.side_by_side)

    def seen(self, blocks: int, clients: int) -> torch.Tensor:
        """Room for losses, and for how many rows were clipped."""
        return torch.empty(2, blocks, clients, self.side_by_side, dtype=torch.float64)

    def by_lane(self, of_blocks: torch.Tensor) -> torch.Tensor:
        """(blocks, clients, LANES or one) as (clients, lanes)."""
        return of_blocks.movedim(0, 1).reshape(of_blocks.shape[1], -1)[:, : self.count]


def layouts(lanes: int, outputs: int) -> list[Layout]:
    """All of so many lanes: wide blocks, then what is left over."""
    left = lanes % LANES
    apart = left if left <= LONE else 0
    cut = ((slice(0, lanes - apart), True), (slice(lanes - apart, lanes), False))
    return [Layout(part, wide, outputs) for part, wide in cut if part.stop > part.start]


def library() -> ctypes.CDLL:
    found = kernels.library()
    if found is None:
        raise RuntimeError("the kernels in C are not compiled")
    return found


def check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """C takes what it is pointed at for what it expects: a bound of another type would be no bound."""
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device.type != "cpu":
        raise TypeError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, not {dtype} {shape}")


def check_all(shard: Shard, theta: torch.Tensor, clip: torch.Tensor, q: int, classes: int) -> None:
    clients, most = shard.clients, shard.rows
    check("x", shard.x, torch.float32, (clients, most, q))
    check("norm", shard.norm, torch.float32, (clients, most, 1))
    check("y", shard.y, torch.int64, (clients, most))
    check("real_rows", shard.real_rows, torch.int64, (clients,))
    check("theta", theta, torch.float32, (theta.shape[0] if theta.shape[0] == clients else 1, *theta.shape[1:]))
    check("clip", clip, torch.float32, theta.shape[1:2])
    check_labels(shard, classes)


def check_evaluation(shard: Shard, theta: torch.Tensor, q: int, classes: int) -> None:
    check("x", shard.x, torch.float32, (1, shard.rows, q))
    check("y", shard.y, torch.int64, (1, shard.rows))
    check("theta", theta, torch.float32, (1, *theta.shape[1:]))
    check_labels(shard, classes)


def check_labels(shard: Shard, classes: int) -> None:
    """A label is a place in memory there."""
    if shard.largest_label >= classes:
        raise ValueError(f"label {shard.largest_label} is none of {classes} classes")


def place(tensor: torch.Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError("the compiled kernel wants neighbouring numbers")
    return tensor.data_ptr()


Part = tuple[torch.Tensor, torch.Tensor]
"""Gradients of some lanes, (clients, lanes, d), and their losses and numbers clipped, (2, clients, lanes)."""


def joined(parts: Sequence[Part], diagnose: bool) -> tuple[torch.Tensor, Diagnostics | None]:
    """Of all lanes; losses to base e."""
    gradients, seen = zip(*parts, strict=True)
    gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients, dim=1)
    if not diagnose:
        return gradient, None
    loss, clipped = torch.cat(seen, dim=2)
    return gradient, Diagnostics((loss * math.log(2)).float(), clipped.float())
