"""DP-FedSAM: sharpness-aware local steps on samples of the rows. The gradient is taken at a perturbed point.

    client i, K steps from y = theta:
    1. u = noisy gradient at y
    2. y <- y - eta_t (noisy gradient at y + rho u / ||u|| + lambda y)

The two gradients use two independent samples. Both are releases, so a step costs twice as much as one of SGD.
"""

from __future__ import annotations

from trainables.lazy import torch
from trainables.methods.base import ClientProgram, ClientRound, Hyperparameter, Hypers, State
from trainables.methods.sampled_steps import (
    SAMPLING,
    SampledStepsMethod,
    SGDSteps,
    client_learning_rate,
    weight_decay,
)
from trainables.privacy.plan import Level


class SharpnessAwareSteps(SGDSteps):
    label = "sharpness-aware steps"
    hypers = ("client_learning_rate", "weight_decay", "rho")

    def direction(self, client: ClientRound, y: torch.Tensor, step: int) -> torch.Tensor:
        uphill = self.sampled_gradient(client, y, 2 * step)
        # an empty sample without noise has gradient 0
        length = torch.linalg.vector_norm(uphill, dim=-1, keepdim=True).clamp(min=torch.finfo(y.dtype).tiny)
        return self.sampled_gradient(client, y + client.hypers["rho"] * (uphill / length), 2 * step + 1)


class DPFedSAM(SampledStepsMethod):
    name = "dp-fedsam"
    title = "DP-FedSAM"
    paper = "Shi et al. 2023 (baseline of DP-FedAdamW)"
    gradients_per_step = 2
    hyperparameters = (
        client_learning_rate(0.1),
        Hyperparameter("rho", 0.05, "length of the perturbation", low=0, open_low=True),
        weight_decay(1e-3),
        *SAMPLING,
    )

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return SharpnessAwareSteps.of(hypers)

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        return theta + G
