"""Client programs that take several local steps before they release their update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainables.lazy import torch
from trainables.methods.base import ClientProgram, ClientRound, Hyperparameter, Hypers, Method, Run, clip_norm
from trainables.privacy.plan import Event, Level


@dataclass(frozen=True)
class LocalSteps(ClientProgram):
    """Record level: from y = theta, K steps y <- y - eta_c (u_i(y) + correction); the release is y - theta.

    u_i(y) is the noisy gradient at y, so the release is a function of noisy gradients only."""

    steps: int
    hypers: ClassVar[tuple[str, ...]] = ("client_learning_rate",)

    @property
    def name(self) -> str:
        return f"{self.steps} local steps"

    def correction(self, client: ClientRound, y: torch.Tensor, theta: torch.Tensor) -> torch.Tensor | float:
        return 0.0

    def gradient(self, client: ClientRound, y: torch.Tensor, step: int) -> torch.Tensor:
        return self.noisy_gradient(client, y, step)

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        y = theta
        for step in range(self.steps):
            direction = self.gradient(client, y, step) + self.correction(client, y, theta)
            y = y - client.hypers["client_learning_rate"] * direction
        return y - theta


@dataclass(frozen=True)
class UserLocalSteps(LocalSteps):
    """User level: K steps without noise; the update y - theta is clipped as a whole and gets noise."""

    allows_secret_participation = True

    @property
    def name(self) -> str:
        return f"{self.steps} local steps of a user"

    def gradient(self, client: ClientRound, y: torch.Tensor, step: int) -> torch.Tensor:
        return client.gradient_mean(y)

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return client.noised_update(clip_norm(super().round(client, theta), client.clip))


LOCAL_STEPS = Hyperparameter(
    "local_steps", 1, "K, local steps of a client in a round", low=1, integer=True, shared=True
)
SERVER_LEARNING_RATE = Hyperparameter(
    "server_learning_rate", 1.0, "factor of the mean of the clients' updates", low=0, open_low=True
)


def client_learning_rate(default: float) -> Hyperparameter:
    return Hyperparameter("client_learning_rate", default, "step size of a client", low=0, open_low=True)


class LocalStepsMethod(Method):
    """A method whose clients take `local_steps` noisy steps. The privacy account counts every step as a release."""

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return LocalSteps(int(hypers["local_steps"]))

    def releases(self, run: Run) -> tuple[Event, ...]:
        steps = int(run.hypers["local_steps"])
        return (Event("gradient", run.rounds * steps, run.privacy.sensitivity, aggregated=steps == 1),)
