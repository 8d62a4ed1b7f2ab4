"""A method's step on the server, recorded as a CUDA graph if the method allows it (`Method.records_step`)."""

from __future__ import annotations

import torch

from trainables.federation.pack import LaneGroup
from trainables.methods.base import State
from trainables.models.recorded import SMALL, Recordings


class RecordedStep:
    """The step of one group of lanes. Make a new one if the group's lanes change."""

    def __init__(self, group: LaneGroup, device: str) -> None:
        self._method, self._hypers, self._device = group.method, group.hypers, device
        self._recordings = Recordings(self._on_tensors)
        self._t, self._names = 0, tuple[str, ...]()

    def __call__(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State) -> torch.Tensor:
        if not self._method.records_step or self._device != "cuda" or len(theta) > SMALL:
            return self._method.step(t, theta, G, state, self._hypers)
        self._t, self._names = t, tuple(state)
        theta, *values = self._recordings(theta, G, *state.values())
        state.update(zip(self._names, values, strict=True))
        return theta

    def _on_tensors(self, theta: torch.Tensor, G: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state = dict(zip(self._names, values, strict=True))
        theta = self._method.step(self._t, theta, G, state, self._hypers)
        if tuple(state) != self._names:
            raise RuntimeError(f"the step of {self._method.name} is recorded, so it must not add to its state")
        return (theta, *state.values())
