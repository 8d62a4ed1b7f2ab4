"""Copies arrays to the GPU through pinned memory that is reused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

LARGEST = 4 * 2**20  # numbers: larger arrays are rare, and would keep their memory pinned
DEPTH = 16  # buffers: how many copies may be in flight before the processor waits for the device


class Staging:
    """A copy from pinned memory is asynchronous, so the next array is filled while the device computes. Pinning memory
    for every array would take longer than filling it."""

    def __init__(self) -> None:
        self._buffers = itertools.cycle([_Buffer() for _ in range(DEPTH)])

    def copy(self, shape: tuple[int, ...], fill: Callable[[NDArray[np.float32]], None]) -> torch.Tensor:
        """A tensor of this shape on the device, with the values that `fill` writes into an array."""
        if math.prod(shape) > LARGEST:
            values = np.empty(shape, dtype=np.float32)
            fill(values)
            return torch.from_numpy(values).to("cuda")
        return next(self._buffers).copy(shape, fill)


class _Buffer:
    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._copied = torch.cuda.Event()

    def copy(self, shape: tuple[int, ...], fill: Callable[[NDArray[np.float32]], None]) -> torch.Tensor:
        self._copied.synchronize()  # the previous contents have reached the device
        size = math.prod(shape)
        if self._memory.numel() < size:
            self._memory = torch.empty(size, pin_memory=True)
        values = self._memory[:size].view(shape)
        fill(values.numpy())
        on_device = values.to("cuda", non_blocking=True)
        self._copied.record()
        return on_device
