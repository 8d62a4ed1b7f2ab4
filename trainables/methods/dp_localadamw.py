"""DP-LocalAdamW: AdamW steps of the clients on samples of their rows; the server adds the mean of their updates.

client i, from y = theta, m = v = 0, for k = 1 .. K, with g the noisy gradient of the sample:
1. m <- beta1 m + (1 - beta1) g
2. v <- beta2 v + (1 - beta2) g^2
3. y <- y - eta_t (m_hat / (sqrt(v_hat) + tau) + lambda y),  m_hat = m / (1 - beta1^k),  v_hat = v / (1 - beta2^k)
"""

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
    Hyperparameter("beta1", 0.9, "decay of the first moment", low=0, high=1, open_high=True),
    Hyperparameter("beta2", 0.999, "decay of the second moment", low=0, high=1, open_high=True),
    Hyperparameter("tau", 1e-8, "added to the root of the second moment", low=0, open_low=True),
    weight_decay(0.01),
)


class AdamWSteps(SampledSteps):
    label = "AdamW steps"
    hypers: ClassVar[tuple[str, ...]] = ("client_learning_rate", "weight_decay", "beta1", "beta2", "tau")

    def local_weights(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        y, _ = self.adamw(client, theta, client.zeros(), torch.ones_like(client.hypers["beta2"], dtype=torch.float64))
        return y

    def adamw(
        self, client: ClientRound, theta: torch.Tensor, v: torch.Tensor, beta2_k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """y and v after K steps. `v` and `beta2_k`: the second moment and the power of beta2 to start from."""
        hypers, eta = client.hypers, self.step_size(client)
        beta1, beta2 = hypers["beta1"], hypers["beta2"]
        y, m, beta1_k = theta, client.zeros(), torch.ones_like(beta2_k)
        for step in range(self.steps):
            g = self.sampled_gradient(client, y, step)
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * self.squared(client, g)
            # running products in float64: `pow` rounds differently at the end of a vector of lanes
            beta1_k, beta2_k = beta1_k * beta1, beta2_k * beta2
            scale = self.root(client, v / (1 - beta2_k).to(v)) + hypers["tau"]
            direction = self.aligned(client, m / (1 - beta1_k).to(m) / scale)
            y = y - eta * (direction + hypers["weight_decay"] * y)
        return y, v

    def squared(self, client: ClientRound, gradient: torch.Tensor) -> torch.Tensor:
        """The estimate of g^2 that v averages."""
        return gradient * gradient

    def root(self, client: ClientRound, v: torch.Tensor) -> torch.Tensor:
        """The root of the second moment, to which tau is added."""
        return v.sqrt()

    def aligned(self, client: ClientRound, direction: torch.Tensor) -> torch.Tensor:
        """The direction of a step, given that of AdamW."""
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
