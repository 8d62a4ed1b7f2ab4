"""DP-SCAFFOLD: local steps corrected by control variates, c_i of the client and their mean c.

    1. client i, K steps from y = theta:  y <- y - eta_c (u_i(y) - c_i + c)
    2. client i:  c_i <- c_i - c + (theta - y) / (K eta_c);  it stays with the client. The release is y - theta.
    3. server:    theta <- theta + eta_s G,  c <- -G / (K eta_c),  G = mean(y - theta)

The server derives c, the mean of the c_i, from G alone. At user level the steps have no noise; the update y - theta is
clipped as a whole and gets noise.
"""

from __future__ import annotations

from trainables.lazy import torch
from trainables.methods.base import ClientProgram, ClientRound, Hypers, Run, State, as_released, clip_norm
from trainables.methods.local_steps import (
    LOCAL_STEPS,
    SERVER_LEARNING_RATE,
    LocalSteps,
    LocalStepsMethod,
    client_learning_rate,
)
from trainables.privacy.plan import LEVELS, Event, Level


class ControlledSteps(LocalSteps):
    stateful = True

    @property
    def name(self) -> str:
        return f"{self.steps} controlled local steps"

    def correction(self, client: ClientRound, y: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        return client.broadcast["c"] - client.state["c_i"]

    def update(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        """The release, y - theta."""
        return super().round(client, theta)

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        client.state.setdefault("c_i", client.zeros())
        update = self.update(client, theta)
        step_sum = self.steps * client.hypers["client_learning_rate"]
        client.state["c_i"] = client.state["c_i"] - client.broadcast["c"] - update / step_sum
        return update


class UserControlledSteps(ControlledSteps):
    @property
    def name(self) -> str:
        return f"{self.steps} controlled local steps of a user"

    def gradient(self, client: ClientRound, y: torch.Tensor, step: int) -> torch.Tensor:
        return client.gradient_mean(y)

    def update(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return clip_norm(super().update(client, theta), client.clip) + client.noise("gradient")


class DPScaffold(LocalStepsMethod):
    name = "dp-scaffold"
    title = "DP-SCAFFOLD"
    paper = "Karimireddy et al. 2020; Noble et al. 2022 (baseline of DP-FedSOFIM, arXiv:2601.09166)"
    levels = LEVELS
    hyperparameters = (
        SERVER_LEARNING_RATE,
        client_learning_rate(0.1),
        LOCAL_STEPS,
        as_released("applies the factor 2 of replace-one twice, so it adds twice the noise"),
    )

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        steps = int(hypers["local_steps"])
        return UserControlledSteps(steps) if level == "user" else ControlledSteps(steps)

    def releases(self, run: Run) -> tuple[Event, ...]:
        sensitivity = run.privacy.sensitivity
        calibrated_for = 2 * sensitivity if run.hypers["as_released"] else None
        if run.privacy.level == "user":
            # c_i contains the client's noise, and clipping keeps the corrections from cancelling in the mean: the next
            # sum reveals part of the noise in this one, so secure aggregation gets no credit. Under local release that
            # noise is known anyway, and the sensitivity holds for any c_i.
            return (Event("gradient", run.rounds, sensitivity, aggregated=False, calibrated_for=calibrated_for),)
        # With one step the corrections cancel in the mean, which is then the mean of the noisy gradients.
        steps = int(run.hypers["local_steps"])
        count = run.rounds * steps
        return (Event("gradient", count, sensitivity, aggregated=steps == 1, calibrated_for=calibrated_for),)

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        return {"c": torch.zeros_like(theta)}

    def broadcast(self, state: State, hypers: Hypers) -> dict[str, torch.Tensor]:
        return {"c": state["c"]}

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        state["c"] = -G / (hypers["local_steps"] * hypers["client_learning_rate"])
        return theta + hypers["server_learning_rate"] * G
