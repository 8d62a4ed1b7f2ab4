"""DP-FedAvg: clients take K noisy steps, the server moves along the mean of where they came to.

At user level the steps are free of noise, and where they lead is clipped to C and noised as a whole (McMahan et al.
2018): however many there are, a round is one release, and in a sum of all clients' their noises add up. With
`secret_participation` q a user's update is in the sum with probability q, and only the user knows; its noise always
is, and the sum is divided by q n, however many there were.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from trainables.methods.base import ClientProgram, Hyperparameter, Hypers, Run, State
from trainables.methods.local_steps import (
    LOCAL_STEPS,
    SERVER_LEARNING_RATE,
    LocalStepsMethod,
    UserLocalSteps,
    client_learning_rate,
)
from trainables.privacy.plan import LEVELS, Event, Level


class DPFedAvg(LocalStepsMethod):
    name = "dp-fedavg"
    title = "DP-FedAvg"
    paper = "McMahan et al. 2017, at user level 2018 (baseline of DP-FedSOFIM, arXiv:2601.09166)"
    levels: ClassVar[tuple[Level, ...]] = LEVELS
    hyperparameters: ClassVar[tuple[Hyperparameter, ...]] = (
        SERVER_LEARNING_RATE,
        client_learning_rate(0.1),
        LOCAL_STEPS,
    )

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return UserLocalSteps(int(hypers["local_steps"])) if level == "user" else super().program(hypers, level)

    def releases(self, run: Run) -> tuple[Event, ...]:
        if run.privacy.level == "user":
            q = run.privacy.secret_participation
            return (Event("gradient", run.rounds, run.privacy.sensitivity, sampling=q, hidden_by_sum=True),)
        return super().releases(run)

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        return theta + hypers["server_learning_rate"] * G
