"""DP-FedAvg: clients take K noisy steps, the server moves along the mean of where they came to.

At user level the steps are free of noise, and where they lead is clipped to C and noised as a whole (McMahan et al.
2018): however many there are, a round is one release, and in a sum of all clients' their noises add up. With
`secret_participation` q a user's update is in the sum with probability q, and only the user knows; its noise always
is, and the sum is divided by q n, however many there were. With `clipping: adaptive` C follows the users' updates.
"""

from __future__ import annotations

from typing import ClassVar

from trainables.lazy import torch
from trainables.methods.adaptive_clip import LENGTH, AdaptiveLocalSteps, taken_apart
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
        if level == "record":
            return super().program(hypers, level)
        return (AdaptiveLocalSteps if _adaptive(hypers) else UserLocalSteps)(int(hypers["local_steps"]))

    def releases(self, run: Run) -> tuple[Event, ...]:
        if run.privacy.level == "user":
            q = run.privacy.secret_participation
            length = LENGTH if run.privacy.clipping == "adaptive" else 1.0
            return (Event("gradient", run.rounds, length * run.privacy.sensitivity, sampling=q, hidden_by_sum=True),)
        return super().releases(run)

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        return {"clip": hypers["clip"].clone()} if _adaptive(hypers) else {}

    def broadcast(self, state: State, hypers: Hypers) -> dict[str, torch.Tensor]:
        return dict(state)

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        update = taken_apart(G, state) if _adaptive(hypers) else G
        return theta + hypers["server_learning_rate"] * update


def _adaptive(hypers: Hypers) -> bool:
    return hypers.get("clipping") == "adaptive"
