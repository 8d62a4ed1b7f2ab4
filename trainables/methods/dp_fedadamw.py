"""DP-FedAdamW: DP-LocalAdamW with a second moment shared across rounds and steps aligned with the global direction.

    client i, K steps as in DP-LocalAdamW, with these differences:
    1. v starts from the mean of the clients' second moments of the previous round, one number per layer, and v_hat
       counts the steps of all rounds: v / (1 - beta2^((t - 1) K + k))
    2. v averages g^2 - s^2; s = std of the noise in g, a public number (s_i = noise std / expected rows)
    3. sqrt(v_hat) is at least noise_floor s, because g^2 - s^2 can average to 0 or less
    4. the direction is gamma (AdamW's) + (1 - gamma) (global update of the previous round) / (-K eta_{t-1})
    5. the release is y - theta and the mean of v over every layer
    server: theta <- theta + mean update; it broadcasts the mean second moments and the global direction

Everything is computed from noisy gradients, so 1 to 5 cost no further privacy. The paper subtracts s^2 after averaging
over clients. Subtracting s_i^2 before averaging gives the same if all clients have the same size, and is also right if
they do not.

`as_released`: the authors' program, as far as it is known. It clips the mean gradient of a sample, layer by layer, not
every record's gradient, and its noise assumes that a record changes that mean by clip / (expected rows). In fact a
record that is added or removed can reverse the whole mean, a change of twice the clip.
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
    label = "aligned AdamW steps"
    hypers = (*AdamWSteps.hypers, "gamma", "noise_floor")

    def release_size(self, model: Model) -> int:
        return model.dimension + len(model.blocks)

    def noise_std(self, client: ClientRound) -> torch.Tensor:
        """s_i, the standard deviation of the noise in a noisy gradient."""
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
    label = "AdamW steps as released"
    most_layers = 2

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
            "noise_floor", 0.3, "least root of the second moment, in standard deviations of the noise", low=0
        ),
        *SAMPLING,
        as_released("clips the mean over a sample, layer by layer, not every record's gradient"),
    )

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return (ReleasedAdamWSteps if hypers["as_released"] else AlignedAdamWSteps).of(hypers)

    def releases(self, run: Run) -> tuple[Event, ...]:
        (event,) = super().releases(run)
        if not run.hypers["as_released"]:
            return (event,)
        rows = float(run.hypers["sampling_rate"]) * max(run.sizes)
        # a record can reverse the clipped mean of every layer
        sensitivity = event.sensitivity * 2 * rows * math.sqrt(ReleasedAdamWSteps.most_layers)
        return (replace(event, sensitivity=sensitivity, calibrated_for=event.sensitivity),)

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
        update, state["second_moment"] = G[:, : theta.shape[1]], G[:, theta.shape[1] :]
        for _ in range(hypers["local_steps"]):
            state["power"] = state["power"] * hypers["beta2"]
        size = hypers["client_learning_rate"] * cosine(t, hypers["rounds"])
        state["direction"] = -update / (hypers["local_steps"] * size)
        return theta + update
