"""DP-FedAvg-LS: local steps on samples; the server smooths the mean move along the order of the weights.

Laplacian smoothing, (I + s L)^-1 with L the second differences on a circle, evens out noise that is independent from
weight to weight. It is done in the frequency domain and is post-processing.
"""

from __future__ import annotations

import math

from trainables.lazy import torch
from trainables.methods.base import ClientProgram, Hyperparameter, Hypers, State
from trainables.methods.sampled_steps import (
    SAMPLING,
    SampledStepsMethod,
    SGDSteps,
    client_learning_rate,
    weight_decay,
)
from trainables.privacy.plan import Level


def smoothed(values: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    """(I + s L)^-1 of every row. One row at a time, so that a lane does not depend on how many there are."""
    size = values.shape[1]
    turn = torch.arange(size // 2 + 1, dtype=torch.float64, device=values.device) * (2 * math.pi / size)
    second_difference = 2 - 2 * torch.cos(turn)
    rows = [
        torch.fft.irfft(torch.fft.rfft(row.double()) / (1 + s.double() * second_difference), n=size)
        for row, s in zip(values, strength, strict=True)
    ]
    return torch.stack(rows).to(values)


class DPFedAvgLS(SampledStepsMethod):
    name = "dp-fedavg-ls"
    title = "DP-FedAvg-LS"
    paper = "Liang et al. 2020 (baseline of DP-FedAdamW)"
    linear = True
    hyperparameters = (
        client_learning_rate(0.1),
        Hyperparameter("smoothing", 1.0, "strength of the Laplacian smoothing; 0: none", low=0),
        weight_decay(1e-3),
        *SAMPLING,
    )

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return SGDSteps.of(hypers)

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        return theta + smoothed(G, hypers["smoothing"])
