"""DP-LocalAdamW: AdamW steps at the clients, on samples of their rows and from zero moments; the server averages."""

from __future__ import annotations

from typing import ClassVar

from trainables.lazy import torch
from trainables.methods.base import ClientProgram, ClientRound, Hyperparameter, Hypers, State
from trainables.methods.sampled_steps import (
    SAMPLING,
    SampledSteps,
    SampledStepsMethod,
    client_learning_rate,
    weight_decay,
)
from trainables.privacy.plan import Level

ADAMW = (
    client_learning_rate(0.01),
    Hyperparameter("beta1", 0.9, "decay of the mean of gradients", low=0, high=1, open_high=True),
    Hyperparameter("beta2", 0.999, "decay of the mean of squared gradients", low=0, high=1, open_high=True),
    Hyperparameter("tau", 1e-8, "added to the root of the mean square", low=0, open_low=True),
    weight_decay(0.01),
)


class AdamWSteps(SampledSteps):
    what = "AdamW steps"
    hypers: ClassVar[tuple[str, ...]] = ("client_learning_rate", "weight_decay", "beta1", "beta2", "tau")

    def steps_from(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        y, _ = self.adamw(client, theta, client.zeros(), torch.ones_like(client.hypers["beta2"], dtype=torch.float64))
        return y

    def adamw(
        self, client: ClientRound, theta: torch.Tensor, v: torch.Tensor, power2: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and the second moment after K steps, which starts at `v`: a mean with weight 1 - `power2`."""
        hypers, eta = client.hypers, self.step_size(client)
        beta1, beta2 = hypers["beta1"], hypers["beta2"]
        y, m, power1 = theta, client.zeros(), torch.ones_like(power2)
        for step in range(self.steps):
            g = self.sampled_gradient(client, y, step)
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * self.squared(client, g)
            # running products in float64: a power would round differently at the end of a vector of lanes
            power1, power2 = power1 * beta1, power2 * beta2
            scale = self.root(client, v / (1 - power2).to(v)) + hypers["tau"]
            direction = self.aligned(client, m / (1 - power1).to(m) / scale)
            y = y - eta * (direction + hypers["weight_decay"] * y)
        return y, v

    def squared(self, client: ClientRound, gradient: torch.Tensor) -> torch.Tensor:
        """What the second moment is the mean of."""
        return gradient * gradient

    def root(self, client: ClientRound, v: torch.Tensor) -> torch.Tensor:
        return v.sqrt()

    def aligned(self, client: ClientRound, direction: torch.Tensor) -> torch.Tensor:
        return direction


class DPLocalAdamW(SampledStepsMethod):
    name = "dp-localadamw"
    title = "DP-LocalAdamW"
    paper = "DP-FedAdamW 2026, algorithm 2"
    hyperparameters = (*ADAMW, *SAMPLING)

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return AdamWSteps.of(hypers)

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        return theta + G
