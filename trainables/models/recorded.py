"""Functions of tensors recorded as CUDA graphs, so that one call launches many small kernels.

With few lanes a round consists of a few hundred kernels of some microseconds each (of a network, thousands), and
launching them takes longer than running them. A recording is for fixed shapes and pays off from the third call on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


@cache
def _side_stream() -> torch.cuda.Stream:
    """One stream for all recordings: libraries keep 32 MiB of workspace per stream."""
    return torch.cuda.Stream()


Function = Callable[..., "torch.Tensor"]
LARGE_LANES = 4
"""Largest number of lanes in a large recording: it has thousands of kernels per lane, which take memory, too."""


class Recordings:
    """The recordings of one function, by the shapes of its inputs. `large`: for networks, of which packs of at most
    `LARGE_LANES` lanes are recorded. Memory of earlier recordings is returned to the device before the first call."""

    def __init__(self, function: Function, *, large: bool = False) -> None:
        self._function, self._large = function, large
        self._by_shape: dict[tuple[torch.Size, ...], _Recording] = {}

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        shapes, lanes = tuple(value.shape for value in inputs), inputs[0].shape[-2]
        if shapes not in self._by_shape:
            # a new number of lanes means a new pack: free the recordings of the last one
            self._by_shape = {known: recording for known, recording in self._by_shape.items() if known[0][-2] == lanes}
            if self._large and lanes > LARGE_LANES:
                return self._function(*inputs)
            if self._large:
                torch.cuda.empty_cache()
            self._by_shape[shapes] = _Recording(self._function, inputs)
        return self._by_shape[shapes](*inputs)


class _Recording:
    def __init__(self, function: Function, inputs: tuple[torch.Tensor, ...]) -> None:
        self._inputs = [value.clone() for value in inputs]
        beside = _side_stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # libraries initialise in a first call, which cannot be recorded
            function(*self._inputs)
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = function(*self._inputs)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        for place, value in zip(self._inputs, inputs, strict=True):
            place.copy_(value)
        self._graph.replay()
        return self._output.clone()
