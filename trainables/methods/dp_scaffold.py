"""DP-SCAFFOLD: local steps corrected by control variates, the client's own c_i and their mean c.

c_i' = c_i - c + (theta - y) / (K eta_c) stays with the client. Its mean moves by what the release y - theta
already tells, so the server needs nothing more: c' = mean of (theta - y) / (K eta_c).
"""

from __future__ import annotations

import torch

from trainables.methods.base import ClientProgram, ClientRound, Hyperparameter, Hypers, State
from trainables.methods.local_steps import (
    LOCAL_STEPS,
    SERVER_LEARNING_RATE,
    LocalSteps,
    LocalStepsMethod,
    client_learning_rate,
)
from trainables.privacy.plan import Event, PrivacySettings


class ControlledSteps(LocalSteps):
    stateful = True

    @property
    def name(self) -> str:
        return f"{self.steps} controlled local steps"

    def correction(self, client: ClientRound, y: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        return client.broadcast["c"] - client.state["c_i"]

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        client.state.setdefault("c_i", client.zeros())
        move = super().round(client, theta)
        taken = self.steps * client.hypers["client_learning_rate"]
        client.state["c_i"] = client.state["c_i"] - client.broadcast["c"] - move / taken
        return move


class DPScaffold(LocalStepsMethod):
    name = "dp-scaffold"
    title = "DP-SCAFFOLD"
    paper = "Karimireddy et al. 2020; Noble et al. 2022 (baseline of DP-FedSOFIM, arXiv:2601.09166)"
    hyperparameters = (
        SERVER_LEARNING_RATE,
        client_learning_rate(0.1),
        LOCAL_STEPS,
        Hyperparameter(
            "as_released",
            False,
            "the authors' program: replace-one's factor 2 applied twice, so twice the noise",
            shared=True,
            switch=True,
        ),
    )

    def program(self, hypers: Hypers) -> ClientProgram:
        return ControlledSteps(int(hypers["local_steps"]))

    def releases(self, privacy: PrivacySettings, rounds: int, hypers: Hypers) -> tuple[Event, ...]:
        (event,) = super().releases(privacy, rounds, hypers)
        factor = 2.0 if hypers["as_released"] else 1.0
        return (Event(event.purpose, event.count, event.sensitivity, event.share, event.aggregated, factor),)

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        return {"c": torch.zeros_like(theta)}

    def broadcast(self, state: State) -> dict[str, torch.Tensor]:
        return {"c": state["c"]}

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        state["c"] = -G / (hypers["local_steps"] * hypers["client_learning_rate"])
        return theta + hypers["server_learning_rate"] * G
