"""DP-FedAdamW: AdamW steps at the clients, with a second moment that outlives the round and steps that are aligned.

Beside its move a client releases the mean of its second moment over every layer; their mean over clients is where the
second moment starts in the next round. A step follows gamma x (AdamW's direction) + (1 - gamma) x (the last global
move, per step and step size). All of it is made from noisy gradients and costs nothing more.
"""

from __future__ import annotations

import torch

from trainables.methods.base import ClientProgram, ClientRound, Hyperparameter, Hypers, State, power_zero
from trainables.methods.dp_localadamw import ADAMW, AdamWSteps
from trainables.methods.sampled_steps import SAMPLING, SampledStepsMethod, cosine
from trainables.models import Model
from trainables.privacy.plan import Level


class AlignedAdamWSteps(AdamWSteps):
    what = "aligned AdamW steps"
    hypers = (*AdamWSteps.hypers, "gamma")

    def release_size(self, model: Model) -> int:
        return model.dimension + len(model.blocks)

    def aligned(self, client: ClientRound, direction: torch.Tensor) -> torch.Tensor:
        gamma = client.hypers["gamma"]
        return gamma * direction + (1 - gamma) * client.broadcast["direction"]

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        sizes = torch.tensor(client.model.blocks, device=theta.device)
        start = torch.repeat_interleave(client.broadcast["second_moment"], sizes, dim=-1)
        y, v = self.adamw(client, theta, start, client.broadcast["power"])
        means = [block.mean(-1, keepdim=True) for block in v.split(client.model.blocks, dim=-1)]
        return torch.cat([y - theta, *means], dim=-1)


class DPFedAdamW(SampledStepsMethod):
    name = "dp-fedadamw"
    title = "DP-FedAdamW"
    paper = "DP-FedAdamW: An Efficient Optimizer for Differentially Private Federated Large Models, 2026"
    hyperparameters = (
        *ADAMW,
        Hyperparameter("gamma", 0.5, "weight of the client's own direction against the last global one", low=0, high=1),
        *SAMPLING,
    )

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return AlignedAdamWSteps.of(hypers)

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        blocks = hypers["model"].blocks
        return {
            "direction": torch.zeros_like(theta),
            "second_moment": theta.new_zeros(theta.shape[0], len(blocks)),
            "power": power_zero(theta),
        }

    def broadcast(self, state: State, hypers: Hypers) -> dict[str, torch.Tensor]:
        return state

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        move, state["second_moment"] = G[:, : theta.shape[1]], G[:, theta.shape[1] :]
        for _ in range(hypers["local_steps"]):
            state["power"] = state["power"] * hypers["beta2"]
        size = hypers["client_learning_rate"] * cosine(t, hypers["rounds"])
        state["direction"] = -move / (hypers["local_steps"] * size)
        return theta + move
