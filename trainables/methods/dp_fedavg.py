"""DP-FedAvg: clients take K noisy steps, the server moves along the mean of where they came to."""

from __future__ import annotations

from typing import ClassVar

import torch

from trainables.methods.base import Hyperparameter, Hypers, State
from trainables.methods.local_steps import (
    LOCAL_STEPS,
    SERVER_LEARNING_RATE,
    LocalStepsMethod,
    client_learning_rate,
)


class DPFedAvg(LocalStepsMethod):
    name = "dp-fedavg"
    title = "DP-FedAvg"
    paper = "McMahan et al. 2017 (baseline of DP-FedSOFIM, arXiv:2601.09166)"
    hyperparameters: ClassVar[tuple[Hyperparameter, ...]] = (
        SERVER_LEARNING_RATE,
        client_learning_rate(0.1),
        LOCAL_STEPS,
    )

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        return theta + hypers["server_learning_rate"] * G
