"""What a method is: what its clients release, how its server uses that, and which hyperparameters it has.

A method is one small file. The client half is a `ClientProgram`, shared by all methods that release the same thing:
their trials can run side by side in one pack. The server half is `step`. All state is laned: tensors of shape
(lanes, ...), and hyperparameters arrive as vectors of shape (lanes, 1), except static ones, which are plain values
shared by the group. Among the latter the server finds four more: the privacy `level`, the `clipping`, the number of
`rounds` and the `model`; and among the vectors the `clip`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from trainables.errors import UserError, in_range, one_of
from trainables.lazy import torch
from trainables.models import Model
from trainables.models.shard import Shard
from trainables.privacy.plan import Event, Level, PrivacySettings
from trainables.spec import HyperValue

State = dict[str, "torch.Tensor"]
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
    integer: bool = False
    choices: tuple[str, ...] = ()
    shared: bool = False
    """For loop counts and switches: lanes that differ in it cannot be computed together."""
    boolean: bool = False
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
        if self.boolean:
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
        ends = ("(" if self.open_low else "[") + (")" if self.open_high or math.isinf(self.high) else "]")
        in_range(self.low, self.high, ends, **{self.name: number})
        if self.integer and number != int(number):
            raise UserError(f"{self.name} = {value!r} is not a whole number")
        return int(number) if self.integer else number


def learning_rate(default: float) -> Hyperparameter:
    return Hyperparameter("learning_rate", default, "server step size", low=0, open_low=True)


def as_released(wrong: str) -> Hyperparameter:
    """The switch to what the authors' own program does, for methods that do not buy there what they claim."""
    return Hyperparameter("as_released", False, f"the authors' program: {wrong}", shared=True, boolean=True)


@dataclass(frozen=True)
class Run:
    """What the privacy of a run depends on."""

    privacy: PrivacySettings
    rounds: int
    hypers: Hypers
    sizes: tuple[int, ...]
    """|D_i| of every client."""
    seed: int
    """Of the samples of clients, who are known to all; never of what must stay secret."""


def clip_norm(values: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Every vector (the last dimension) shortened to l2 norm `bound` where it is longer."""
    norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    return values * (bound / norm).clamp(max=1)


def initial_power(theta: torch.Tensor) -> torch.Tensor:
    """beta^0 for every lane. A state multiplies it by beta each round, in float64: `pow` rounds differently at the end
    of a vector of lanes."""
    return torch.ones(theta.shape[0], 1, dtype=torch.float64, device=theta.device)


Parts = Sequence[tuple["slice | torch.Tensor", Shard]]
"""Lanes, and the rows that they look at."""


@dataclass(frozen=True)
class Sample:
    """Rows drawn for one step; lanes of different seeds have different ones."""

    parts: Parts
    rate: float


class ClientRound(Protocol):
    """What a client program may use in one round. It speaks for one client or for several side by side: tensors have
    the shape (clients, lanes, ...), or (lanes, ...) where clients do not differ."""

    t: int
    """The round, from 1."""
    rounds: int
    """How many rounds the run has."""
    size: torch.Tensor
    """|D_i|, in a shape that divides."""
    clip: torch.Tensor
    """The lanes' bounds on what a record (or a user) contributes, (lanes, 1)."""
    hypers: Mapping[str, torch.Tensor]
    """The hyperparameters that the program asked for."""
    broadcast: Mapping[str, torch.Tensor]
    """What the server sent beside theta."""
    state: State
    """What the client keeps from round to round; it never leaves the host but in checkpoints."""
    model: Model
    shard: Shard
    """The clients' rows, for what is no gradient."""

    def clipped_gradient_sum(self, theta: torch.Tensor, sample: Sample | None = None) -> torch.Tensor:
        """The sum over the client's rows, or a sample of them, of per-example gradients clipped to the bounds. It is in
        double precision until the noise is there: rounding a large sum may tell a record."""

    def gradient_mean(self, theta: torch.Tensor, sample: Sample | None = None) -> torch.Tensor:
        """The mean over the client's rows, or a sample of as many as expected, of per-example gradients, nothing
        clipped."""

    def sample(self, rate: float, step: int = 0) -> Sample:
        """Some of the client's rows: each with probability `rate`, drawn for this round and step."""

    def noise(
        self, purpose: str, step: int = 0, t: int | None = None, factor: float = 1, size: int | None = None
    ) -> torch.Tensor:
        """The noise that the privacy plan prescribes for this purpose, at this round's address or another's; times a
        factor, -1 takes it back; as long as the weights, or of the given size."""

    def turn_mask(self, every: int) -> torch.Tensor:
        """1 where it is the client's turn in this round, 0 where it is not: everybody knows, and it is every so many
        rounds."""

    def noise_std(self, purpose: str) -> torch.Tensor:
        """The standard deviation of that noise, (lanes, 1)."""

    def noised_update(self, update: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        """A user's update with noise of `gradient`, which is scaled by what everybody knows. Where participation
        is secret, every user answers, with its update or with nothing as a coin says that only it sees, and noise; over
        the coin's probability, which is public, so that the mean over all users is the same on average."""

    def zeros(self) -> torch.Tensor:
        """A state of the weights' shape."""

    def distinct_noise(self, purpose: str, size: int) -> torch.Tensor:
        """Noise for a release that is the same for all lanes but for its noise: one row for every distinct one."""


class ClientProgram(ABC):
    """The client half of a method."""

    hypers: ClassVar[tuple[str, ...]] = ()
    """Which hyperparameters the clients need."""
    prepares: ClassVar[bool] = False
    """Whether the clients release something once, before the first round."""
    allows_secret_participation: ClassVar[bool] = False
    """Whether what a user releases is a `noised_update`, so that it may keep secret if it takes part."""
    adapts_clip: ClassVar[bool] = False
    """Whether the clip follows what was released, beginning with that of the claim."""

    @property
    def stateful(self) -> bool:
        """Whether the clients keep something from round to round."""
        return False

    @property
    def samples(self) -> bool:
        """Whether the clients look at some of their rows at a time."""
        return False

    @property
    def participation(self) -> float:
        """The share of the clients that take part in a round. A program whose clients keep state needs them all."""
        return 1.0

    def release_size(self, model: Model) -> int:
        """How many numbers a client releases in a round."""
        return model.dimension

    @property
    @abstractmethod
    def name(self) -> str:
        """Trials whose programs have the same name can share a pack."""

    def prepare(self, client: ClientRound) -> torch.Tensor:
        """The release made once: one row for every distinct noise among the lanes."""
        raise NotImplementedError(f"{self.name} prepares nothing")

    @abstractmethod
    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        """The client's release; the server sees the mean over all clients."""

    def noisy_gradient(
        self, client: ClientRound, theta: torch.Tensor, step: int = 0, purpose: str = "gradient"
    ) -> torch.Tensor:
        """u_i = (sum of clipped gradients + noise) / |D_i|."""
        return ((client.clipped_gradient_sum(theta) + client.noise(purpose, step)) / client.size).to(theta.dtype)


class NoisyGradient(ClientProgram):
    """One noisy gradient a round."""

    name = "noisy gradient"

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return self.noisy_gradient(client, theta)


class UserGradient(ClientProgram):
    """One noisy gradient a round, that of all the client's rows clipped as a whole: the client is the record."""

    name = "noisy gradient of a user"

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return clip_norm(client.gradient_mean(theta), client.clip) + client.noise("gradient")


class Method(ABC):
    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    hyperparameters: ClassVar[tuple[Hyperparameter, ...]]
    levels: ClassVar[tuple[Level, ...]] = ("record",)
    """Whose privacy it can protect."""
    second_order: ClassVar[bool] = False
    """Whether it bends its steps by a matrix, not coordinate by coordinate: tables set such methods against others."""

    def accepts(self, model: Model) -> bool:
        """Whether it makes sense on this model."""
        return True

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        """The client half, given the static hyperparameters and the `clipping`."""
        return UserGradient() if level == "user" else NoisyGradient()

    def releases(self, run: Run) -> tuple[Event, ...]:
        """What every client releases in the course of a run, for the privacy plan to price. What cannot be priced is
        said here, before anything starts."""
        return (Event("gradient", run.rounds, run.privacy.sensitivity),)

    def bound_only(self, hypers: Hypers) -> bool:
        """Whether its account is what can be proven, from above, where the truth may be far below."""
        return False

    def resolve(self, hypers: dict[str, HyperValue], privacy: PrivacySettings) -> dict[str, HyperValue]:
        """Replace `auto` by what it stands for under this privacy budget."""
        return hypers

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        """The server's state before the first round."""
        return {}

    def receive(self, prepared: torch.Tensor, which: torch.Tensor, state: State, hypers: Hypers) -> None:
        """Take the mean of the releases made once; lane i's is row which[i]."""
        raise NotImplementedError(f"{self.name} prepares nothing")

    def broadcast(self, state: State, hypers: Hypers) -> dict[str, torch.Tensor]:
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
