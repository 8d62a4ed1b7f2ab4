"""DP-FedAdamW: AdamW steps at the clients, with a second moment that outlives the round and steps that are aligned.

Beside its move a client releases the mean of its second moment over every layer; their mean over clients is where the
second moment starts in the next round. A step follows gamma x (AdamW's direction) + (1 - gamma) x (the last global
move, per step and step size). All of it is made from noisy gradients and costs nothing more.

A noisy gradient's square is too large by the variance of its noise, which is known: (std / expected rows)^2. It is
taken off every square before that enters the mean, so that what clients of unequal size send is free of it too; where
all are alike this is the paper's v - s^2. The corrected mean can come out at nothing or below: its root counts as at
least `noise_floor` standard deviations of that noise.
`as_released`: what is known of the authors' program. The mean over a sample is clipped, layer by layer, not every
record's gradient; the noise is made for a record that moves such a mean by clip / (expected rows). One record can turn
the whole mean, by twice the clip.
"""

from __future__ import annotations

import math
from dataclasses import replace

from trainables.lazy import torch
from trainables.methods.base import (
    ClientProgram,
    ClientRound,
    Hyperparameter,
    Hypers,
    Run,
    State,
    as_released,
    clip_norm,
    initial_power,
)
from trainables.methods.dp_localadamw import ADAMW, AdamWSteps
from trainables.methods.sampled_steps import SAMPLING, SampledStepsMethod, cosine
from trainables.models import Model
from trainables.privacy.plan import Event, Level


class AlignedAdamWSteps(AdamWSteps):
    what = "aligned AdamW steps"
    hypers = (*AdamWSteps.hypers, "gamma", "noise_floor")

    def release_size(self, model: Model) -> int:
        return model.dimension + len(model.blocks)

    def noise_std(self, client: ClientRound) -> torch.Tensor:
        """Of a noisy gradient."""
        return client.noise_std("gradient") / (self.rate * client.size)

    def squared(self, client: ClientRound, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * gradient - self.noise_std(client).square()

    def root(self, client: ClientRound, v: torch.Tensor) -> torch.Tensor:
        return torch.maximum(v.clamp(min=0).sqrt(), client.hypers["noise_floor"] * self.noise_std(client))

    def aligned(self, client: ClientRound, direction: torch.Tensor) -> torch.Tensor:
        gamma = client.hypers["gamma"]
        return gamma * direction + (1 - gamma) * client.broadcast["direction"]

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        sizes = torch.tensor(client.model.blocks, device=theta.device)
        start = torch.repeat_interleave(client.broadcast["second_moment"], sizes, dim=-1)
        y, v = self.adamw(client, theta, start, client.broadcast["power"])
        means = [block.mean(-1, keepdim=True) for block in v.split(client.model.blocks, dim=-1)]
        return torch.cat([y - theta, *means], dim=-1)


class ReleasedAdamWSteps(AlignedAdamWSteps):
    what = "AdamW steps as released"

    def sampled_gradient(self, client: ClientRound, y: torch.Tensor, step: int) -> torch.Tensor:
        mean = client.gradient_mean(y, client.sample(self.rate, step))
        layers = [clip_norm(layer, client.clip) for layer in mean.split(client.model.blocks, dim=-1)]
        return torch.cat(layers, dim=-1) + client.noise("gradient", step) / (self.rate * client.size)


class DPFedAdamW(SampledStepsMethod):
    name = "dp-fedadamw"
    title = "DP-FedAdamW"
    paper = "DP-FedAdamW: An Efficient Optimizer for Differentially Private Federated Large Models, 2026"
    hyperparameters = (
        *ADAMW,
        Hyperparameter("gamma", 0.5, "weight of the client's own direction against the last global one", low=0, high=1),
        Hyperparameter(
            "noise_floor", 0.3, "least root of the corrected mean square, in standard deviations of the noise", low=0
        ),
        *SAMPLING,
        as_released("the mean over a sample is clipped, layer by layer, and not every record's gradient"),
    )

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return (ReleasedAdamWSteps if hypers["as_released"] else AlignedAdamWSteps).of(hypers)

    def releases(self, run: Run) -> tuple[Event, ...]:
        (event,) = super().releases(run)
        if not run.hypers["as_released"]:
            return (event,)
        rows = float(run.hypers["sampling_rate"]) * max(run.sizes)
        # of every layer's mean a record can turn the whole; there are two layers at most
        return (replace(event, sensitivity=event.sensitivity * rows * math.sqrt(2), calibrated_for=event.sensitivity),)

    def bound_only(self, hypers: Hypers) -> bool:
        return bool(hypers["as_released"])

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        blocks = hypers["model"].blocks
        return {
            "direction": torch.zeros_like(theta),
            "second_moment": theta.new_zeros(theta.shape[0], len(blocks)),
            "power": initial_power(theta),
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
