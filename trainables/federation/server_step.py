"""A method's step on the server, recorded as a CUDA graph if the method allows it (`Method.records_step`)."""

from __future__ import annotations

from typing import Any, cast

import torch

from trainables.federation.pack import LaneGroup
from trainables.methods.base import Method, State
from trainables.models import recorded
from trainables.models.recorded import Function, Recordings


class ServerStep:
    """The step of one group of lanes. Make a new one if the group's lanes change."""

    def __init__(self, group: LaneGroup, device: str) -> None:
        self._group, self._device, self._is_recorded = group, device, may_be_recorded(group.method)
        self._names: tuple[str, ...] | None = None
        """Of the state that the recordings are for."""
        self._recordings = Recordings({})

    def __call__(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State) -> torch.Tensor:
        if not self._is_recorded:
            return self._group.method.step(t, theta, G, state, self._group.hypers)
        if self._device != "cuda" or not recorded.is_small(1, theta):
            return self._group.method.step(NO_ROUND, theta, G, state, self._group.hypers)
        if self._names != tuple(state):
            self._names = tuple(state)
            self._recordings = Recordings({"step": _step_on_tensors(self._group, self._names)})
        theta, *values = self._recordings("step", theta, G, *state.values())
        state.update(zip(self._names, values, strict=True))
        return theta


def may_be_recorded(method: Method) -> bool:
    """Whether the class that defines `step` allows it. A subclass with another step has to allow it again."""
    (defines, *_) = [kind for kind in type(method).__mro__ if "step" in vars(kind)]
    return method.records_step and "records_step" in vars(defines)


def _step_on_tensors(group: LaneGroup, names: tuple[str, ...]) -> Function:
    def step(theta: torch.Tensor, G: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state = dict(zip(names, values, strict=True))
        theta = group.method.step(NO_ROUND, theta, G, state, group.hypers)
        if tuple(state) != names:
            raise RuntimeError(f"the step of {group.method.name} is recorded, so it must not add to its state")
        return (theta, *state.values())

    return step


class _NoRound:
    """In place of t in a step that may be recorded: a recording would repeat the operations of one round. Any use is an
    error, also on a CPU."""

    def _refuse(self, *_: object) -> Any:
        raise TypeError("t was used in a step with records_step = True: keep a counter in its state instead")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = __hash__ = __str__ = __format__ = _refuse


NO_ROUND = cast(int, _NoRound())
