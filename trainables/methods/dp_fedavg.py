"""DP-FedAvg: clients take K local steps, and the server adds the mean of their updates.

    1. client i: K steps with step size eta_c lead from theta to y_i
    2. server:   theta <- theta + eta_s mean(y_i - theta)

Record level: every local step uses a noisy gradient.
User level (McMahan et al. 2018): the steps have no noise; the update is clipped to C and gets noise once, so a round is
one release for any K. With `secret_participation` q, user i's update is in the sum with probability q, and only
the user knows whether it is. The user's noise is always in the sum, which is divided by q n. With
`clipping: adaptive`, C follows the median norm of the updates (`adaptive_clip`).
"""

from __future__ import annotations

from typing import ClassVar

from trainables.lazy import torch
from trainables.methods.adaptive_clip import RELEASE_NORM, AdaptiveLocalSteps, split_release
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
            norm = RELEASE_NORM if run.privacy.clipping == "adaptive" else 1.0
            return (Event("gradient", run.rounds, norm * run.privacy.sensitivity, sampling=q, hidden_by_sum=True),)
        return super().releases(run)

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        return {"clip": hypers["clip"].clone()} if _adaptive(hypers) else {}

    def broadcast(self, state: State, hypers: Hypers) -> dict[str, torch.Tensor]:
        return dict(state)

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        if _adaptive(hypers):
            G, state["clip"] = split_release(G, state["clip"])
        return theta + hypers["server_learning_rate"] * G


def _adaptive(hypers: Hypers) -> bool:
    return hypers.get("clipping") == "adaptive"
