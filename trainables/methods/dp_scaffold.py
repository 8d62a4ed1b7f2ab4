"""DP-SCAFFOLD: local steps corrected by control variates, the client's own c_i and their mean c.

c_i' = c_i - c + (theta - y) / (K eta_c) stays with the client. Its mean moves by what the release y - theta
already tells, so the server needs nothing more: c' = mean of (theta - y) / (K eta_c).
At user level the steps are not private; their outcome y - theta is clipped and noised as a whole.
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

    def move(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        """What the client releases, y - theta."""
        return super().round(client, theta)

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        client.state.setdefault("c_i", client.zeros())
        move = self.move(client, theta)
        taken = self.steps * client.hypers["client_learning_rate"]
        client.state["c_i"] = client.state["c_i"] - client.broadcast["c"] - move / taken
        return move


class UserControlledSteps(ControlledSteps):
    @property
    def name(self) -> str:
        return f"{self.steps} controlled local steps of a user"

    def gradient(self, client: ClientRound, y: torch.Tensor, step: int) -> torch.Tensor:
        return client.gradient_mean(y)

    def move(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return clip_norm(super().move(client, theta), client.clip) + client.noise("gradient")


class DPScaffold(LocalStepsMethod):
    name = "dp-scaffold"
    title = "DP-SCAFFOLD"
    paper = "Karimireddy et al. 2020; Noble et al. 2022 (baseline of DP-FedSOFIM, arXiv:2601.09166)"
    levels = LEVELS
    hyperparameters = (
        SERVER_LEARNING_RATE,
        client_learning_rate(0.1),
        LOCAL_STEPS,
        as_released("replace-one's factor 2 applied twice, so twice the noise"),
    )

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        steps = int(hypers["local_steps"])
        return UserControlledSteps(steps) if level == "user" else ControlledSteps(steps)

    def releases(self, run: Run) -> tuple[Event, ...]:
        moves = run.privacy.sensitivity
        calibrated_for = 2 * moves if run.hypers["as_released"] else None
        if run.privacy.level == "user":
            # every c_i follows its client's noise, and clipped corrections do not cancel: the next round's sum shows
            # some of the noise that hid this one's. Seen locally it is known anyway, and the bound holds for any c_i
            return (Event("gradient", run.rounds, moves, aggregated=False, calibrated_for=calibrated_for),)
        # with a single step the corrections cancel in the mean, and it is the mean of the clients' noisy gradients
        steps = int(run.hypers["local_steps"])
        return (Event("gradient", run.rounds * steps, moves, aggregated=steps == 1, calibrated_for=calibrated_for),)

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        return {"c": torch.zeros_like(theta)}

    def broadcast(self, state: State, hypers: Hypers) -> dict[str, torch.Tensor]:
        return {"c": state["c"]}

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        state["c"] = -G / (hypers["local_steps"] * hypers["client_learning_rate"])
        return theta + hypers["server_learning_rate"] * G
