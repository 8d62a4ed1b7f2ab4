"""The way of arrays to the GPU: pinned memory that is used over and over."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

LARGEST = 4 * 2**20  # numbers: more is sent once in a while, and would stay locked in memory for good
DEPTH = 16  # how many arrays may be on their way: so far the processor may be ahead of the device


class Staging:
    """From pinned memory a copy does not wait for the device, so the next array is filled while it computes. To pin
    memory anew for every array takes longer than to fill it."""

    def __init__(self) -> None:
        self._places = itertools.cycle([_Place() for _ in range(DEPTH)])

    def sent(self, shape: tuple[int, ...], fill: Callable[[NDArray[np.float32]], None]) -> torch.Tensor:
        """What `fill` writes into an array of this shape, on the device."""
        if math.prod(shape) > LARGEST:
            values = np.empty(shape, dtype=np.float32)
            fill(values)
            return torch.from_numpy(values).to("cuda")
        return next(self._places).sent(shape, fill)


class _Place:
    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._left = torch.cuda.Event()

    def sent(self, shape: tuple[int, ...], fill: Callable[[NDArray[np.float32]], None]) -> torch.Tensor:
        self._left.synchronize()  # what was here before is on the device
        size = math.prod(shape)
        if self._memory.numel() < size:
            self._memory = torch.empty(size, pin_memory=True)
        values = self._memory[:size].view(shape)
        fill(values.numpy())
        there = values.to("cuda", non_blocking=True)
        self._left.record()
        return there
