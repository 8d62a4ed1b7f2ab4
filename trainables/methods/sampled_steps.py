"""Client programs that take local steps on Poisson samples of their rows. Rounds may leave out clients.

    client i, K steps from y = theta:
    1. u = (sum over the sample of clipped gradients + noise) / (rate |D_i|)
    2. y <- y - eta_t d(u),  eta_t = eta (1 + cos(pi (t - 1) / rounds)) / 2

d(u) is the direction of the step, which a subclass defines. The divisor is the expected number of rows, a public
constant. The samples of rows are secret, and the account credits them. Which clients take part in a round is public and
gets no credit.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from trainables.lazy import torch
from trainables.methods.base import ClientProgram, ClientRound, Hyperparameter, Hypers, Method, Run
from trainables.methods.local_steps import LOCAL_STEPS
from trainables.privacy.participation import most_rounds
from trainables.privacy.plan import Event

SAMPLING_RATE = Hyperparameter(
    "sampling_rate",
    0.02,
    "probability of a row to be in a step's sample",
    low=0,
    high=1,
    open_low=True,
    shared=True,
)
PARTICIPATION = Hyperparameter(
    "participation", 0.2, "fraction of the clients that take part in a round", low=0, high=1, open_low=True, shared=True
)
SAMPLING = (replace(LOCAL_STEPS, default=10), SAMPLING_RATE, PARTICIPATION)


def client_learning_rate(default: float) -> Hyperparameter:
    return Hyperparameter(
        "client_learning_rate", default, "step size of a client in the first round", low=0, open_low=True
    )


def weight_decay(default: float) -> Hyperparameter:
    return Hyperparameter("weight_decay", default, "lambda: every step shrinks the weights by eta lambda", low=0)


def cosine(t: int, rounds: int) -> float:
    """eta_t / eta."""
    return 0.5 * (1 + math.cos(math.pi * (t - 1) / rounds))


@dataclass(frozen=True)
class SampledSteps(ClientProgram):
    """K local steps on samples; the release is y - theta."""

    steps: int
    rate: float
    share: float
    hypers: ClassVar[tuple[str, ...]] = ("client_learning_rate", "weight_decay")
    label: ClassVar[str]

    @property
    def name(self) -> str:
        return f"{self.steps} {self.label} on samples of {self.rate!r} by {self.share!r} of the clients"

    @property
    def samples(self) -> bool:
        return self.rate < 1

    @property
    def participation(self) -> float:
        return self.share

    @classmethod
    def of(cls, hypers: Hypers) -> SampledSteps:
        return cls(int(hypers["local_steps"]), float(hypers["sampling_rate"]), float(hypers["participation"]))

    def sampled_gradient(self, client: ClientRound, y: torch.Tensor, step: int) -> torch.Tensor:
        total = client.clipped_gradient_sum(y, client.sample(self.rate, step)) + client.noise("gradient", step)
        return (total / (self.rate * client.size)).to(y.dtype)

    def step_size(self, client: ClientRound) -> torch.Tensor:
        return client.hypers["client_learning_rate"] * cosine(client.t, client.rounds)

    @abstractmethod
    def local_weights(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        """y after K steps from theta."""

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return self.local_weights(client, theta) - theta


class SGDSteps(SampledSteps):
    label = "steps"

    def direction(self, client: ClientRound, y: torch.Tensor, step: int) -> torch.Tensor:
        return self.sampled_gradient(client, y, step)

    def local_weights(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        y, eta = theta, self.step_size(client)
        for step in range(self.steps):
            y = y - eta * (self.direction(client, y, step) + client.hypers["weight_decay"] * y)
        return y


class SampledStepsMethod(Method):
    gradients_per_step: ClassVar[int] = 1
    linear: ClassVar[bool] = False
    """Whether the release of a single step is linear in the noisy gradient, so that the clients' noise adds up."""

    def releases(self, run: Run) -> tuple[Event, ...]:
        steps, share = int(run.hypers["local_steps"]), float(run.hypers["participation"])
        rounds = most_rounds(run.seed, run.rounds, len(run.sizes), share)
        return (
            Event(
                "gradient",
                rounds * steps * self.gradients_per_step,
                run.privacy.sensitivity,
                aggregated=self.linear and steps == 1 and share == 1,
                sampling=float(run.hypers["sampling_rate"]),
            ),
        )
