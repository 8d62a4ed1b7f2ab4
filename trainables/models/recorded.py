"""Functions of tensors recorded as CUDA graphs, so that one call launches many small kernels.

With few lanes a round consists of many kernels of some microseconds each (of a network, thousands), and launching
them takes longer than running them. A recording is for fixed shapes and pays off from the third call on.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache

import torch

SMALL_LANES = 256
SMALL_NUMBERS = 1 << 22
"""Lanes, and numbers (clients x lanes x weights), up to which a whole step is recorded. Launches of larger steps take
less time than their kernels, and a recording keeps the memory of all intermediate results."""
LARGE_LANES = 4
"""Largest number of lanes in a recording of a network: it has thousands of kernels per lane, which take memory, too."""
FREE_SHARE = 1 / 8
"""If less than this share of the memory is free, what is cached is returned to the device before a recording. In a
recording that is not possible."""

Function = Callable[..., "tuple[torch.Tensor, ...]"]


def is_small(clients: int, theta: torch.Tensor) -> bool:
    """`theta` is (..., lanes, weights)."""
    lanes, weights = theta.shape[-2:]
    return lanes <= SMALL_LANES and clients * lanes * weights <= SMALL_NUMBERS


@cache
def _side_stream() -> torch.cuda.Stream:
    """One stream for all recordings: libraries keep 32 MiB of workspace per stream."""
    return torch.cuda.Stream()


class Recordings:
    """The recordings of some functions, by the shapes of their inputs. The first input is (..., lanes, weights); when
    its lanes change, earlier recordings are dropped. `network`: at most `LARGE_LANES` lanes are recorded."""

    def __init__(self, functions: Mapping[Hashable, Function], *, network: bool = False) -> None:
        self._functions, self._network = functions, network
        self._known: dict[Hashable, _Recording] = {}
        self._lanes = 0

    def __call__(
        self, name: Hashable, *inputs: torch.Tensor, constants: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, ...]:
        """`constants`: further inputs that are never written to. They are copied only if they are other tensors than in
        the last call."""
        lanes = inputs[0].shape[-2]
        if lanes != self._lanes:  # a new pack, or lanes that have ended
            self._known, self._lanes = {}, lanes
        key = name, *((value.shape, value.dtype) for value in (*inputs, *constants))
        if key not in self._known:
            if self._network and lanes > LARGE_LANES:
                return self._functions[name](*inputs, *constants)
            if self._network or lanes > SMALL_LANES or _is_low_on_memory():
                torch.cuda.empty_cache()
            self._known[key] = _Recording(self._functions[name], (*inputs, *constants))
        return self._known[key](inputs, constants)


def _is_low_on_memory() -> bool:
    free, total = torch.cuda.mem_get_info()
    return free < FREE_SHARE * total


class _Recording:
    def __init__(self, function: Function, inputs: tuple[torch.Tensor, ...]) -> None:
        self._inputs = [value.clone() for value in inputs]
        self._constants: Sequence[torch.Tensor] = ()
        beside = _side_stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            function(*self._inputs)  # libraries initialise in a first call, which cannot be recorded
            # torch.cuda.graph would also wait for the device and empty its cache, which takes milliseconds
            self._graph = torch.cuda.CUDAGraph()
            self._graph.capture_begin()
            try:
                self._outputs = function(*self._inputs)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of the recording that has failed
                    self._graph.capture_end()
                raise
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
