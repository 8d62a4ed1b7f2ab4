"""The part that all C kernels share: memory layouts of lanes, argument checks, pointers.

Lanes are computed in wide blocks of LANES. If only a few are left over, they are computed one by one in the narrow
layout, which wastes no work on padding. A lane's result is bit-identical in both layouts.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from trainables.lazy import torch
from trainables.models import kernels
from trainables.models.kernels import LANES
from trainables.models.lanes import from_blocks, to_blocks, vector_to_blocks
from trainables.models.shard import Diagnostics, Shard

LOG2E = math.log2(math.e)
MAX_NARROW = 5  # up to this many lanes are faster one by one than in a block of LANES


@dataclass(frozen=True)
class Layout:
    """A range of lanes, and their memory layout."""

    lanes: slice
    wide: bool
    outputs: int
    """Classes, or hidden units."""

    @property
    def columns(self) -> int:
        """Numbers per row of the weights, with padding."""
        if self.wide:
            return self.outputs * LANES
        width = library().vector_width()
        return -(-self.outputs // width) * width

    def weights(self, mine: torch.Tensor, rows: int) -> torch.Tensor:
        """(clients, lanes of this range, d) as (blocks, clients, rows, columns)."""
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
    def block_lanes(self) -> int:
        """Lanes per block."""
        return LANES if self.wide else 1

    def clips(self, clip: torch.Tensor) -> torch.Tensor:
        return vector_to_blocks(clip[self.lanes], self.block_lanes)

    def norm_columns(self, shard: Shard, lanes: int) -> torch.Tensor:
        return vector_to_blocks(shard.norm_columns(lanes)[self.lanes], self.block_lanes, padding=0)

    def diagnostics(self, blocks: int, clients: int) -> torch.Tensor:
        """Memory for losses and numbers of clipped rows."""
        return torch.empty(2, blocks, clients, self.block_lanes, dtype=torch.float64)

    def by_lane(self, diagnostics: torch.Tensor) -> torch.Tensor:
        """(2, blocks, clients, LANES or 1) as (2, clients, lanes)."""
        return diagnostics.movedim(1, 2).flatten(2)[..., : self.count]


def layouts(lanes: int, outputs: int) -> list[Layout]:
    """The layouts of `lanes` lanes: wide blocks, then the narrow layout if at most `MAX_NARROW` lanes are left over."""
    left = lanes % LANES
    apart = left if left <= MAX_NARROW else 0
    cut = ((slice(0, lanes - apart), True), (slice(lanes - apart, lanes), False))
    return [Layout(part, wide, outputs) for part, wide in cut if part.stop > part.start]


def library() -> ctypes.CDLL:
    found = kernels.library()
    if found is None:
        raise RuntimeError("the C kernels are not compiled")
    return found


def check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """C does not check types: a clip of another dtype would be read as garbage and bound nothing."""
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device.type != "cpu":
        raise TypeError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, not {dtype} {shape}")


def check_gradient_inputs(shard: Shard, theta: torch.Tensor, clip: torch.Tensor, q: int, classes: int) -> None:
    """`theta` is (lanes, d), or (clients or 1, lanes, d)."""
    clients, most = shard.clients, shard.rows
    check("x", shard.x, torch.float32, (clients, most, q))
    check("norm", shard.norm, torch.float32, (clients, most, 1 if shard.centres is None else len(shard.centres.means)))
    check("y", shard.y, torch.int64, (clients, most))
    check("real_rows", shard.real_rows, torch.int64, (clients,))
    whose = [1 if theta.shape[0] == 1 else clients] * (theta.dim() - 2)
    check("theta", theta, torch.float32, (*whose, *theta.shape[-2:]))
    check("clip", clip, torch.float32, theta.shape[-2:-1])
    check_labels(shard, classes)
    if shard.centres is not None and int(shard.centres.of_lane.max()) >= shard.norm.shape[2]:
        raise ValueError(f"a lane has a centre that is not one of {shard.norm.shape[2]}")


def check_evaluation(shard: Shard, theta: torch.Tensor, q: int, classes: int) -> None:
    check("x", shard.x, torch.float32, (1, shard.rows, q))
    check("y", shard.y, torch.int64, (1, shard.rows))
    check("theta", theta, torch.float32, theta.shape[-2:])
    check_labels(shard, classes)


def check_labels(shard: Shard, classes: int) -> None:
    """C uses labels as memory offsets."""
    if shard.largest_label >= classes:
        raise ValueError(f"label {shard.largest_label} is not one of {classes} classes")


def pointer(tensor: torch.Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError("the compiled kernel needs a contiguous tensor")
    return tensor.data_ptr()


def per_client(theta: torch.Tensor) -> bool:
    """Whether clients have different weights."""
    return theta.dim() == 3 and theta.shape[0] > 1


def pointers(diagnostics: torch.Tensor | None) -> tuple[int | None, int | None]:
    """Pointers to losses and to numbers of clipped rows."""
    return (None, None) if diagnostics is None else (pointer(diagnostics[0]), pointer(diagnostics[1]))


class Part(NamedTuple):
    """The result for a range of lanes."""

    gradient: torch.Tensor
    """(clients, lanes, d)"""
    diagnostics: torch.Tensor | None
    """Losses and numbers of clipped rows, (2, clients, lanes), if requested."""


def join_lanes(parts: Sequence[Part]) -> tuple[torch.Tensor, Diagnostics | None]:
    """The result for all lanes; losses are converted from base 2 to base e."""
    gradients, diagnostics = (
        [part.gradient for part in parts],
        [part.diagnostics for part in parts if part.diagnostics is not None],
    )
    gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients, dim=1)
    if not diagnostics:
        return gradient, None
    loss, clipped = torch.cat(diagnostics, dim=2)
    return gradient, Diagnostics((loss * math.log(2)).float(), clipped.float())


T = TypeVar("T")


class LastCall(Generic[T]):
    """Caches the last result of a function of theta: a host calls it with the same theta for many clients.

    The cache is valid for the same tensor object, as long as torch has not written to it. Writes that bypass torch, for
    example through a shared NumPy array, are not detected. Per-client weights change at every step and are not cached.
    On a GPU nothing is cached: a call that is recorded as a CUDA graph must compute the result, so that every replay
    does."""

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._last: tuple[torch.Tensor, tuple[object, ...], T] | None = None

    def of(self, theta: torch.Tensor, *how: object) -> T:
        if theta.dim() == 3 or theta.is_cuda or theta.is_inference():  # inference tensors have no version counter
            return self._make(theta, *how)
        last, asked = self._last, (theta._version, *how)
        if last is None or last[0] is not theta or last[1] != asked:
            self._last = None  # free it before the next one is made
            last = self._last = (theta, asked, self._make(theta, *how))
        return last[2]
