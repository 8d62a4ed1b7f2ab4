"""Functions of tensors recorded as CUDA graphs, so that one call launches many small kernels.

With few lanes a round consists of many kernels of some microseconds each (of a network, thousands), and launching
them takes longer than running them. A recording is for fixed shapes and pays off from the third call on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache

import torch

SMALL = 256
"""Lanes of a small pack. In larger ones, launches take less time than the kernels, and copies of inputs take memory."""


@cache
def _side_stream() -> torch.cuda.Stream:
    """One stream for all recordings: libraries keep 32 MiB of workspace per stream."""
    return torch.cuda.Stream()


Function = Callable[..., "tuple[torch.Tensor, ...]"]
LARGE_LANES = 4
"""Largest number of lanes in a large recording: it has thousands of kernels per lane, which take memory, too."""


class Recordings:
    """The recordings of one function, by the shapes of its inputs; the first input is (..., lanes, numbers).

    `large`: for networks, of which packs of at most `LARGE_LANES` lanes are recorded. Before a large recording, memory
    of earlier ones is returned to the device."""

    def __init__(self, function: Function, *, large: bool = False) -> None:
        self._function, self._large = function, large
        self._by_shape: dict[tuple[torch.Size, ...], _Recording] = {}

    def __call__(self, *inputs: torch.Tensor, constants: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, ...]:
        """`constants`: further inputs that nobody writes to. They are copied only if they are other tensors than in the
        last call."""
        shapes, lanes = tuple(value.shape for value in (*inputs, *constants)), inputs[0].shape[-2]
        if shapes not in self._by_shape:
            # a new number of lanes means a new pack: free the recordings of the last one
            self._by_shape = {known: recording for known, recording in self._by_shape.items() if known[0][-2] == lanes}
            if self._large and lanes > LARGE_LANES:
                return self._function(*inputs, *constants)
            if self._large or lanes > SMALL:
                torch.cuda.empty_cache()
            self._by_shape[shapes] = _Recording(self._function, (*inputs, *constants))
        return self._by_shape[shapes](inputs, constants)


class _Recording:
    def __init__(self, function: Function, inputs: tuple[torch.Tensor, ...]) -> None:
        self._inputs = [value.clone() for value in inputs]
        beside = _side_stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # libraries initialise in a first call, which cannot be recorded
            function(*self._inputs)
        torch.cuda.current_stream().wait_stream(beside)
        self._constants: Sequence[torch.Tensor] = ()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(beside):  # torch.cuda.graph would also wait for the device and empty its cache
            self._graph.capture_begin()
            try:
                self._outputs = function(*self._inputs)
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(beside)

    def __call__(self, inputs: Sequence[torch.Tensor], constants: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        changing, fixed = self._inputs[: len(inputs)], self._inputs[len(inputs) :]
        for place, value in zip(changing, inputs, strict=True):
            place.copy_(value)
        same = len(self._constants) == len(constants) and all(map(operator.is_, self._constants, constants))
        if not same:
            for place, value in zip(fixed, constants, strict=True):
                place.copy_(value)
            self._constants = constants  # kept, so that no other tensor can be the same object
        self._graph.replay()
        return tuple(output.clone() for output in self._outputs)
