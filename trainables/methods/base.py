"""What a method is: what its clients release, how its server uses that, and which hyperparameters it has.

A method is one small file. The client half is a `ClientProgram`, shared by all methods that release the same thing:
their trials can run side by side in one pack. The server half is `step`. All state is laned: tensors of shape
(lanes, ...), and hyperparameters arrive as vectors of shape (lanes, 1), except static ones, which are plain values
shared by the group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from trainables.errors import UserError, name_in_range, one_of
from trainables.privacy.plan import Event, PrivacySettings
from trainables.spec import HyperValue

State = dict[str, torch.Tensor]
Hypers = Mapping[str, Any]
AUTO = "auto"


@dataclass(frozen=True)
class Hyperparameter:
    name: str
    default: HyperValue
    description: str
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    whole: bool = False
    choices: tuple[str, ...] = ()
    shared: bool = False
    """For loop counts and switches: lanes that differ in it cannot be computed together."""
    switch: bool = False
    """Whether it is true or false."""
    auto: bool = False
    """Whether `auto` is allowed; the method says what it stands for."""

    @property
    def static(self) -> bool:
        """Choices and the like are one plain value for a group of lanes; everything else is a number per lane."""
        return bool(self.choices) or self.shared

    def check(self, value: HyperValue) -> HyperValue:
        """The value in its proper type, or a sentence that names it."""
        if self.auto and value == AUTO:
            return AUTO
        if self.switch:
            words = {"true": True, "false": False}
            if isinstance(value, str) and value.lower() in words:
                value = words[value.lower()]
            if not isinstance(value, bool):
                raise UserError(f"{self.name} = {value!r} is neither true nor false")
            return value
        if self.choices:
            one_of(self.choices, **{self.name: str(value)})
            return str(value)
        try:
            number = float(value) if not isinstance(value, bool) else math.nan
        except ValueError:
            raise UserError(f"{self.name} = {value!r} is not a number") from None
        open_high = self.open_high or math.isinf(self.high)
        name_in_range(self.name, number, self.low, self.high, open_low=self.open_low, open_high=open_high)
        if self.whole and number != int(number):
            raise UserError(f"{self.name} = {value!r} is not a whole number")
        return int(number) if self.whole else number


def learning_rate(default: float) -> Hyperparameter:
    return Hyperparameter("learning_rate", default, "server step size", low=0, open_low=True)


def power_zero(theta: torch.Tensor) -> torch.Tensor:
    """beta^0 for every lane. A state multiplies it by beta each round, in float64: `pow` rounds differently at the end
    of a vector of lanes."""
    return torch.ones(theta.shape[0], 1, dtype=torch.float64, device=theta.device)


class ClientRound(Protocol):
    """What a client program may use in one round. It speaks for one client or for several side by side: tensors have
    the shape (clients, lanes, ...), or (lanes, ...) where clients do not differ."""

    t: int
    """The round, from 1."""
    size: torch.Tensor
    """|D_i|, in a shape that divides."""
    hypers: Mapping[str, torch.Tensor]
    """The hyperparameters that the program asked for."""
    broadcast: Mapping[str, torch.Tensor]
    """What the server sent beside theta."""
    state: State
    """What the client keeps from round to round; it never leaves the host but in checkpoints."""

    def clipped_gradient_sum(self, theta: torch.Tensor) -> torch.Tensor:
        """The sum over the client's rows of per-example gradients clipped to the lanes' bounds."""

    def noise(self, purpose: str, step: int = 0, t: int | None = None, sign: int = 1) -> torch.Tensor:
        """The noise that the privacy plan prescribes for this purpose, at this round's address or another's; taken back
        with sign -1."""

    def zeros(self) -> torch.Tensor:
        """A state of the weights' shape."""

    def clipped_gram(self, bound: float) -> torch.Tensor:
        """The sum over the client's rows of x x^T, every x clipped to l2 norm `bound`; flat."""

    def distinct_noise(self, purpose: str, size: int) -> torch.Tensor:
        """Noise for a release that is the same for all lanes but for its noise: one row for every distinct one."""


class ClientProgram(ABC):
    """The client half of a method."""

    hypers: ClassVar[tuple[str, ...]] = ()
    """Which hyperparameters the clients need."""
    stateful: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """Trials whose programs have the same name can share a pack."""

    def prepare(self, client: ClientRound) -> torch.Tensor | None:
        """A release made once, before the first round: one row for every distinct noise among the lanes."""
        return None

    @abstractmethod
    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        """The client's release; the server sees the mean over all clients."""

    def noisy_gradient(self, client: ClientRound, theta: torch.Tensor, step: int = 0) -> torch.Tensor:
        """u_i = (sum of clipped gradients + noise) / |D_i|."""
        return (client.clipped_gradient_sum(theta) + client.noise("gradient", step)) / client.size


class NoisyGradient(ClientProgram):
    """One noisy gradient a round."""

    name = "noisy gradient"

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return self.noisy_gradient(client, theta)


class Method(ABC):
    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    hyperparameters: ClassVar[tuple[Hyperparameter, ...]]

    def program(self, hypers: Hypers) -> ClientProgram:
        """The client half, given the static hyperparameters."""
        return NoisyGradient()

    def releases(self, privacy: PrivacySettings, rounds: int, hypers: Hypers) -> tuple[Event, ...]:
        """What every client releases in the course of a run, for the privacy plan to price."""
        return (Event("gradient", rounds, privacy.record_sensitivity),)

    def resolve(self, hypers: dict[str, HyperValue], privacy: PrivacySettings) -> dict[str, HyperValue]:
        """Replace `auto` by what it stands for under this privacy budget."""
        return hypers

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        """The server's state before the first round."""
        return {}

    def receive(self, prepared: torch.Tensor, which: torch.Tensor, state: State, hypers: Hypers) -> None:
        """Take the mean of the releases made once; lane i's is row which[i]."""
        raise NotImplementedError(f"{self.name} prepares nothing")

    def broadcast(self, state: State) -> dict[str, torch.Tensor]:
        """What the clients need beside theta."""
        return {}

    @abstractmethod
    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        """The weights after round t = 1, 2, …, given the mean release G. Updates `state`."""

    def check(self, given: Mapping[str, HyperValue]) -> dict[str, HyperValue]:
        """All hyperparameters: the given ones checked, the others at their defaults."""
        known = {h.name: h for h in self.hyperparameters}
        for name in given:
            if name not in known:
                raise UserError(f"{self.name} has no hyperparameter {name!r}; it has: {', '.join(known)}")
        return {name: h.check(given.get(name, h.default)) for name, h in known.items()}

    @property
    def static_names(self) -> tuple[str, ...]:
        return tuple(h.name for h in self.hyperparameters if h.static)
