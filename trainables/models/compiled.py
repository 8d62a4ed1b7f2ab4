"""What the heads in C have in common: how lanes lie in memory, and what is handed over.

Lanes go in wide blocks of LANES; a few that are left over go one by one in the narrow layout, which pays for no others.
The bits of a lane are the same in either.
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

    def weights(self, mine: torch.Tensor, rows: int) -> torch.Tensor:
        """(clients, lanes of these, d) as (blocks, clients, rows, columns)."""
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

    def by_lane(self, seen: torch.Tensor) -> torch.Tensor:
        """(2, blocks, clients, LANES or one) as (2, clients, lanes)."""
        return seen.movedim(1, 2).flatten(2)[..., : self.count]


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
    """`theta` is (lanes, d), or (clients or one, lanes, d)."""
    clients, most = shard.clients, shard.rows
    check("x", shard.x, torch.float32, (clients, most, q))
    check("norm", shard.norm, torch.float32, (clients, most, 1))
    check("y", shard.y, torch.int64, (clients, most))
    check("real_rows", shard.real_rows, torch.int64, (clients,))
    whose = [1 if theta.shape[0] == 1 else clients] * (theta.dim() - 2)
    check("theta", theta, torch.float32, (*whose, *theta.shape[-2:]))
    check("clip", clip, torch.float32, theta.shape[-2:-1])
    check_labels(shard, classes)


def check_evaluation(shard: Shard, theta: torch.Tensor, q: int, classes: int) -> None:
    check("x", shard.x, torch.float32, (1, shard.rows, q))
    check("y", shard.y, torch.int64, (1, shard.rows))
    check("theta", theta, torch.float32, theta.shape[-2:])
    check_labels(shard, classes)


def check_labels(shard: Shard, classes: int) -> None:
    """A label is a place in memory there."""
    if shard.largest_label >= classes:
        raise ValueError(f"label {shard.largest_label} is none of {classes} classes")


def place(tensor: torch.Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError("the compiled kernel wants neighbouring numbers")
    return tensor.data_ptr()


def per_client(theta: torch.Tensor) -> bool:
    """Whether every client has weights of its own."""
    return theta.dim() == 3 and theta.shape[0] > 1


def places(seen: torch.Tensor | None) -> tuple[int | None, int | None]:
    """Of losses and of numbers clipped."""
    return (None, None) if seen is None else (place(seen[0]), place(seen[1]))


class Part(NamedTuple):
    """Some lanes."""

    gradient: torch.Tensor
    """(clients, lanes, d)"""
    seen: torch.Tensor | None
    """If asked for, losses and numbers clipped: (2, clients, lanes)."""


def joined(parts: Sequence[Part]) -> tuple[torch.Tensor, Diagnostics | None]:
    """Of all lanes; losses to base e."""
    gradients, seen = [part.gradient for part in parts], [part.seen for part in parts if part.seen is not None]
    gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients, dim=1)
    if not seen:
        return gradient, None
    loss, clipped = torch.cat(seen, dim=2)
    return gradient, Diagnostics((loss * math.log(2)).float(), clipped.float())


T = TypeVar("T")


class Remembered(Generic[T]):
    """What was made of the weights of all clients, while the same are asked for: a host goes through its clients with
    them. The same tensor, that is, not written to by torch since; whoever writes past torch, as NumPy does to an array
    that both share, has to give another one. Weights of a client's own change at every step: none are kept."""

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._last: tuple[torch.Tensor, tuple[object, ...], T] | None = None

    def of(self, theta: torch.Tensor, *how: object) -> T:
        if theta.dim() == 3 or theta.is_inference():  # the latter do not count how often they are written to
            return self._make(theta, *how)
        last, asked = self._last, (theta._version, *how)
        if last is None or last[0] is not theta or last[1] != asked:
            self._last = None  # not two of them at a time
            last = self._last = (theta, asked, self._make(theta, *how))
        return last[2]
