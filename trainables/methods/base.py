"""The interface of a method: what clients release, how the server updates the weights, and the hyperparameters.

A run computes, with theta the weights, n clients and G the mean of their releases:

    0. state = method.initial_state(theta)
       if program.prepares: method.receive(mean over clients of program.prepare(client))
    for t = 1 .. rounds:
       1. the server sends theta and method.broadcast(state) to every client
       2. client i returns its release, program.round(client, theta)
       3. G = mean of the releases of the clients that take part, with equal weights or weighted by |D_i|
       4. theta = method.step(t, theta, G, state, hypers)

A method implements `step` and declares in `releases` what its clients release, so that the privacy plan can calibrate
the noise. It chooses its `ClientProgram` in `program`; by default that is one noisy gradient a round. Several methods
may use the same program, and trials with the same program can share a pack.

Shapes: everything is computed for many trials at once. Weights and server state are (lanes, ...), one lane per trial.
Hyperparameters are (lanes, 1) tensors, except static ones, which are plain Python values shared by all lanes.
On the server (`initial_state`, `receive`, `broadcast`, `step`), `hypers` also contains `clip` (lanes, 1) and the plain
values `level`, `clipping`, `rounds` and `model`. A lane's result must not depend on the other lanes.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from trainables.errors import UserError, in_range, one_of
from trainables.lazy import torch
from trainables.models import Model
from trainables.models.clipping import clip_factors
from trainables.models.network_settings import NetworkSettings
from trainables.models.shard import Shard
from trainables.privacy.plan import Event, Level, PrivacySettings
from trainables.spec import HyperValue

State = dict[str, "torch.Tensor"]
Hypers = Mapping[str, Any]
AUTO = "auto"


@dataclass(frozen=True)
class Hyperparameter:
    """A number, a boolean or a choice, with its default and its allowed values."""

    name: str
    """Name in study files."""
    default: HyperValue
    """The value if neither the search space nor the study sets it."""
    description: str
    """A phrase for `fedsweep methods`."""
    low: float = -math.inf
    """Smallest value."""
    high: float = math.inf
    """Largest value."""
    open_low: bool = False
    """Whether `low` itself is excluded."""
    open_high: bool = False
    """Whether `high` itself is excluded."""
    integer: bool = False
    """Whether it is a whole number."""
    choices: tuple[str, ...] = ()
    """The allowed words, for a choice."""
    shared: bool = False
    """Whether all lanes of a pack must have the same value. Set it for loop counts and for hyperparameters that select
    the client program."""
    boolean: bool = False
    """Whether it is true or false."""
    auto: bool = False
    """Whether the value `auto` is allowed; `Method.resolve` replaces it."""

    @property
    def static(self) -> bool:
        """Whether `hypers` has one plain value for all lanes, not a number per lane."""
        return bool(self.choices) or self.shared

    def check(self, value: HyperValue) -> HyperValue:
        """The value converted to its type. Raises UserError if it is not allowed."""
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
        except (TypeError, ValueError):
            raise UserError(f"{self.name} = {value!r} is not a number") from None
        ends = ("(" if self.open_low else "[") + (")" if self.open_high or math.isinf(self.high) else "]")
        in_range(self.low, self.high, ends, **{self.name: number})
        single = _in_single_precision(number)
        if (self.open_low and single <= self.low) or (self.open_high and single >= self.high):
            raise UserError(f"{self.name} = {value!r} is {single:g} in single precision, which is not allowed")
        if self.integer and number != int(number):
            raise UserError(f"{self.name} = {value!r} is not a whole number")
        return int(number) if self.integer else number


def _in_single_precision(number: float) -> float:
    """As trials compute with it."""
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:
        return math.copysign(math.inf, number)


def learning_rate(default: float) -> Hyperparameter:
    """The hyperparameter `learning_rate`: the server's step size, above 0."""
    return Hyperparameter("learning_rate", default, "server step size", low=0, open_low=True)


NETWORK_HYPERPARAMETERS = (
    *(
        Hyperparameter(f"{kind}_scale", default, f"scale of the {kind} parameters of a network", low=0, open_low=True)
        for kind, default in (
            ("norm", NetworkSettings.norm_scale),
            ("bias", NetworkSettings.bias_scale),
            ("lora", NetworkSettings.lora_scale),
        )
    ),
    Hyperparameter(
        "rank", NetworkSettings.rank, "rank of the LoRA factors of a network", low=1, high=1024, integer=True
    ),
)
"""Hyperparameters that every method has if its model is a network."""


def as_released(difference: str) -> Hyperparameter:
    """The option to run the authors' released program, for programs whose actual eps differs from the claimed one."""
    return Hyperparameter("as_released", False, f"the authors' program: {difference}", shared=True, boolean=True)


@dataclass(frozen=True)
class Run:
    """Everything the privacy of a run depends on."""

    privacy: PrivacySettings
    """The claimed budget, the release model and the clip."""
    rounds: int
    """Rounds that the budget is split over."""
    hypers: Hypers
    """The method's hyperparameters, as plain values."""
    sizes: tuple[int, ...]
    """|D_i|, the number of rows, of every client."""
    seed: int
    """Seed of the public choices, such as the clients sampled for a round."""


def clip_norm(values: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """v min(1, bound / ||v||) for every vector v along the last dimension; never longer than the bound."""
    return values * clip_factors(values, bound)


def initial_power(theta: torch.Tensor) -> torch.Tensor:
    """beta^0 = 1 for every lane, (lanes, 1). Multiply it by beta every round to get beta^t.

    A running product in float64 instead of `pow`, whose vectorised loop can round its last elements differently: a
    lane's result would depend on its position."""
    return torch.ones(theta.shape[0], 1, dtype=torch.float64, device=theta.device)


Parts = Sequence[tuple["slice | torch.Tensor", Shard]]
"""Lanes, and the rows whose gradients they use."""


@dataclass(frozen=True)
class Sample:
    """A Poisson sample of every client's rows. Lanes with different seeds have different samples."""

    parts: Parts
    rate: float


class ClientRound(Protocol):
    """What a client program can access in one round.

    It represents one client, or several that are computed together: tensors are (clients, lanes, ...), or (lanes, ...)
    if they are the same for all clients."""

    t: int
    """The round, starting from 1."""
    rounds: int
    """Number of rounds of the run."""
    size: torch.Tensor
    """|D_i|, the client's number of rows, in a shape that divides a release."""
    clip: torch.Tensor
    """C, the l2 bound on the contribution of a record (or a user), (lanes, 1)."""
    hypers: Mapping[str, torch.Tensor]
    """The hyperparameters listed in `ClientProgram.hypers`."""
    broadcast: Mapping[str, torch.Tensor]
    """What the server sent in addition to theta."""
    state: State
    """The client's state, kept from round to round. It leaves the host only in checkpoints."""
    model: Model
    """The model that is trained."""

    def rows_by_centre(self) -> Iterator[tuple[slice | torch.Tensor, Shard]]:
        """The clients' rows, for computations other than gradients. Yields, for every distinct centre of the features,
        the lanes with that centre and the rows minus the centre. Without centring, yields all lanes and the rows
        once."""

    def for_distinct_noises(self, function: Callable[[Shard], torch.Tensor]) -> torch.Tensor:
        """For `prepare`: the values of `function` for every distinct noise among the lanes, (clients, noises, ...).
        `function` maps rows to (clients, ...) and is called once for every distinct centre of the features."""

    def clipped_gradient_sum(self, theta: torch.Tensor, sample: Sample | None = None) -> torch.Tensor:
        """sum_x g_x min(1, C / ||g_x||), with g_x the gradient of row x, over all rows or those of a sample. With
        automatic clipping the factor is C / (||g_x|| + 0.01).

        In float64 until noise has been added: rounding a large sum could reveal a record."""

    def gradient_mean(self, theta: torch.Tensor, sample: Sample | None = None) -> torch.Tensor:
        """The mean of the unclipped gradients, over all rows or those of a sample; for a sample, the sum divided by its
        expected number of rows."""

    def noisy_gradient(self, theta: torch.Tensor, step: int = 0, purpose: str = "gradient") -> torch.Tensor:
        """(clipped_gradient_sum(theta) + noise(purpose, step)) / size, in the type of theta."""

    def sample(self, rate: float, step: int = 0) -> Sample:
        """A sample of the rows for this round and step: each row with probability `rate`."""

    def noise(
        self, purpose: str, step: int = 0, t: int | None = None, factor: float = 1, size: int | None = None
    ) -> torch.Tensor:
        """`factor` times the Gaussian noise that the privacy plan prescribes for `purpose`.

        The noise is a function of seed, client, round t (by default this one), step and purpose: the same arguments
        give the same noise, so factor = -1 cancels earlier noise. `size`: by default the number of weights."""

    def noise_std(self, purpose: str) -> torch.Tensor:
        """The standard deviation of the noise for `purpose`, (lanes, 1)."""

    def distinct_noise(self, purpose: str, size: int) -> torch.Tensor:
        """For `prepare`: one noise for every distinct combination of seed and noise scales among the lanes,
        (clients, noises, size)."""

    def turn_mask(self, every: int) -> torch.Tensor:
        """1 if this round is the client's turn, else 0. Each client has one turn in `every` rounds, publicly."""

    def noised_update(self, update: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        """A user's update plus `scale` times the noise for "gradient"; `scale` must be public.

        With secret participation q, the release is (b update + noise) / q, where b is secretly 1 with probability q,
        else 0. Every user sends a release, and the mean over all users has the right expectation."""

    def zeros(self) -> torch.Tensor:
        """Zeros in the shape of the weights, for initial state."""


class ClientProgram(ABC):
    """The client side of a method. Programs are immutable; state belongs in `ClientRound.state`."""

    hypers: ClassVar[tuple[str, ...]] = ()
    """The hyperparameters that clients need."""
    prepares: ClassVar[bool] = False
    """Whether clients release something once before the first round."""
    allows_secret_participation: ClassVar[bool] = False
    """Whether every release is a `noised_update`. Only then can a user keep secret whether it takes part."""
    adapts_clip: ClassVar[bool] = False
    """Whether the clip changes during the run, starting from the one in the privacy settings."""
    most_layers: ClassVar[int | None] = None
    """The largest number of layers for which the privacy account holds; None: any number."""

    @property
    def stateful(self) -> bool:
        """Whether clients keep state from round to round."""
        return False

    @property
    def samples(self) -> bool:
        """Whether clients compute gradients on samples of their rows."""
        return False

    @property
    def participation(self) -> float:
        """The fraction of the clients that take part in a round. It must be 1 for stateful programs."""
        return 1.0

    def release_size(self, model: Model) -> int:
        """Numbers in a client's release of one round."""
        return model.dimension

    @property
    @abstractmethod
    def name(self) -> str:
        """Identifies the program and all its parameters: trials whose programs have the same name can share a pack."""

    def prepare(self, client: ClientRound) -> torch.Tensor:
        """The release before the first round: one row for every distinct noise among the lanes."""
        raise NotImplementedError(f"{self.name} prepares nothing")

    @abstractmethod
    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        """The client's release of one round, noise included."""

    def noisy_gradient(
        self, client: ClientRound, theta: torch.Tensor, step: int = 0, purpose: str = "gradient"
    ) -> torch.Tensor:
        """u_i = (sum of clipped gradients + noise) / |D_i|."""
        return client.noisy_gradient(theta, step, purpose)


class NoisyGradient(ClientProgram):
    """Record level: u_i = (sum of clipped per-example gradients + noise) / |D_i|."""

    name = "noisy gradient"

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return self.noisy_gradient(client, theta)


class UserGradient(ClientProgram):
    """User level: the mean gradient of all the client's rows, clipped as a whole, plus noise."""

    name = "noisy gradient of a user"

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return clip_norm(client.gradient_mean(theta), client.clip) + client.noise("gradient")


class Method(ABC):
    """A federated learning algorithm. Instances have no state of their own."""

    name: ClassVar[str]
    """Name in study files and on the command line, e.g. dp-fedgd."""
    title: ClassVar[str]
    """Name in tables, e.g. DP-FedGD."""
    paper: ClassVar[str]
    """The paper it comes from."""
    hyperparameters: ClassVar[tuple[Hyperparameter, ...]]
    """Everything that can be tuned, except clip and rounds."""
    levels: ClassVar[tuple[Level, ...]] = ("record",)
    """The units that it can protect: records, users (clients with all their records), or both."""
    second_order: ClassVar[bool] = False
    """Whether it preconditions with a matrix that is not diagonal. Tables compare these methods with the others."""
    records_step: ClassVar[bool] = False
    """Whether a GPU may record `step` as a CUDA graph, which makes small packs faster if it has many operations. Such a
    step does not use t, does the same operations in every round, and copies nothing to the CPU. A subclass with another
    step has to set this again."""

    needs: ClassVar[str] = "another model"
    """Which models it accepts, as the end of a message."""

    def accepts(self, model: Model) -> bool:
        """Whether it can train this model."""
        return True

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        """The client program. `hypers` has the static hyperparameters and `clipping`."""
        return UserGradient() if level == "user" else NoisyGradient()

    def releases(self, run: Run) -> tuple[Event, ...]:
        """Everything a client releases during a run, for the privacy account. Raises UserError if no account exists."""
        return (Event("gradient", run.rounds, run.privacy.sensitivity),)

    def bound_only(self, hypers: Hypers) -> bool:
        """Whether the account is a proven upper bound that may be far from tight."""
        return False

    def resolve(self, hypers: dict[str, HyperValue], privacy: PrivacySettings) -> dict[str, HyperValue]:
        """The hyperparameters with every `auto` replaced by its value for these privacy settings."""
        return hypers

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        """The server's state before the first round."""
        return {}

    def receive(self, prepared: torch.Tensor, which: torch.Tensor, state: State, hypers: Hypers) -> None:
        """Store in `state` the mean of what clients released in `prepare`: for lane i, row which[i] of `prepared`."""
        raise NotImplementedError(f"{self.name} prepares nothing")

    def broadcast(self, state: State, hypers: Hypers) -> dict[str, torch.Tensor]:
        """What clients need in addition to theta."""
        return {}

    @abstractmethod
    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        """The weights after round t = 1, 2, ..., given the mean release G. May update `state`."""

    def check(self, given: Mapping[str, HyperValue]) -> dict[str, HyperValue]:
        """All hyperparameters: the given ones checked, the others at their defaults. Those of a network are included
        only if they are given; otherwise the model's settings apply."""
        own = {h.name: h for h in self.hyperparameters}
        known = own | {h.name: h for h in NETWORK_HYPERPARAMETERS if h.name in given}
        for name in given:
            if name not in known:
                option = f" ({name} is an option of its own)" if name in ("clip", "rounds") else ""
                raise UserError(f"{self.name} has no hyperparameter {name!r}{option}; it has: {', '.join(own)}")
        return {name: h.check(given.get(name, h.default)) for name, h in known.items()}

    @property
    def static_names(self) -> tuple[str, ...]:
        """Names of the hyperparameters that have one plain value for all lanes."""
        return tuple(h.name for h in self.hyperparameters if h.static)
