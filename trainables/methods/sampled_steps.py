"""Clients that take noisy steps on Poisson samples of their rows, some of the clients each round.

A step's sum is divided by the expected number of rows, which is no secret. The samples are, and buy privacy; who takes
part is known and buys none. The step size falls along a cosine over the rounds.
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
    "probability with which a row is in a step's sample",
    low=0,
    high=1,
    open_low=True,
    shared=True,
)
PARTICIPATION = Hyperparameter(
    "participation", 0.2, "share of the clients that take part in a round", low=0, high=1, open_low=True, shared=True
)
SAMPLING = (replace(LOCAL_STEPS, default=10), SAMPLING_RATE, PARTICIPATION)


def client_learning_rate(default: float) -> Hyperparameter:
    return Hyperparameter(
        "client_learning_rate", default, "step size of a client in the first round", low=0, open_low=True
    )


def weight_decay(default: float) -> Hyperparameter:
    return Hyperparameter("weight_decay", default, "how fast the weights shrink, times the step size", low=0)


def cosine(t: int, rounds: int) -> float:
    """The part of the first round's step size that is left in round t."""
    return 0.5 * (1 + math.cos(math.pi * (t - 1) / rounds))


@dataclass(frozen=True)
class SampledSteps(ClientProgram):
    """From y = theta, K steps y -= eta_t direction; the release is y - theta."""

    steps: int
    rate: float
    share: float
    hypers: ClassVar[tuple[str, ...]] = ("client_learning_rate", "weight_decay")
    what: ClassVar[str]

    @property
    def name(self) -> str:
        return f"{self.steps} {self.what} on samples of {self.rate!r} by {self.share!r} of the clients"

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
    def steps_from(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        """Where the steps lead."""

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return self.steps_from(client, theta) - theta


class SGDSteps(SampledSteps):
    what = "steps"

    def direction(self, client: ClientRound, y: torch.Tensor, step: int) -> torch.Tensor:
        return self.sampled_gradient(client, y, step)

    def steps_from(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        y, eta = theta, self.step_size(client)
        for step in range(self.steps):
            y = y - eta * (self.direction(client, y, step) + client.hypers["weight_decay"] * y)
        return y


class SampledStepsMethod(Method):
    gradients_per_step: ClassVar[int] = 1
    linear: ClassVar[bool] = False
    """Whether a release of a single step is linear in the noisy gradient, so that the clients' noises add up."""

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
