"""DP-AdaFedProx: DP-FedAvg with a proximal term whose weight decays over the rounds.

client i:  y <- y - eta_c (u_i(y) + mu_t (y - theta)),  mu_t = max(mu_0 / sqrt(t), mu_0 / 10)
"""

from __future__ import annotations

import math

from trainables.lazy import torch
from trainables.methods.base import ClientProgram, ClientRound, Hyperparameter, Hypers
from trainables.methods.dp_fedavg import DPFedAvg
from trainables.methods.local_steps import (
    LOCAL_STEPS,
    SERVER_LEARNING_RATE,
    LocalSteps,
    client_learning_rate,
)
from trainables.privacy.plan import Level


class ProximalSteps(LocalSteps):
    hypers = ("client_learning_rate", "mu0")

    @property
    def name(self) -> str:
        return f"{self.steps} proximal local steps"

    def correction(self, client: ClientRound, y: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        return client.hypers["mu0"] * max(1 / math.sqrt(client.t), 0.1) * (y - theta)


class DPAdaFedProx(DPFedAvg):
    name = "dp-adafedprox"
    title = "DP-AdaFedProx"
    paper = "Sahoo et al. 2024 (baseline of DP-FedSOFIM, arXiv:2601.09166)"
    levels = ("record",)
    hyperparameters = (
        SERVER_LEARNING_RATE,
        client_learning_rate(0.1),
        Hyperparameter("mu0", 0.1, "weight of the proximal term in the first round", low=0),
        LOCAL_STEPS,
    )

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return ProximalSteps(int(hypers["local_steps"]))
