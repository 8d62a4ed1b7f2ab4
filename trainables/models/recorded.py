"""Functions of tensors recorded as CUDA graphs: many small kernels are then started by one call.

With few lanes a round is a few hundred kernels of some microseconds each, and starting them takes longer than running
them. A recording is of fixed shapes; it is worth its while from the third call on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


@cache
def _side_stream() -> torch.cuda.Stream:
    """One for all recordings: libraries keep 32 MiB of workspace for every stream they have seen."""
    return torch.cuda.Stream()


Function = Callable[..., "torch.Tensor"]


class Recordings:
    """The recordings of one function, by the shapes of what it is given."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._found: dict[tuple[torch.Size, ...], _Recording] = {}

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        shapes = tuple(value.shape for value in inputs)
        if shapes not in self._found:
            lanes = inputs[0].shape[-2]
            # another number of lanes is another pack: what was recorded for the last one is memory lost
            self._found = {known: found for known, found in self._found.items() if known[0][-2] == lanes}
            self._found[shapes] = _Recording(self._function, inputs)
        return self._found[shapes](*inputs)


class _Recording:
    def __init__(self, function: Function, inputs: tuple[torch.Tensor, ...]) -> None:
        self._inputs = [value.clone() for value in inputs]
        beside = _side_stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # libraries set themselves up in a first call, which cannot be recorded
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
