"""DP-FedAvg-LS: local steps on samples; the server smooths the mean update with a discrete Laplacian.

    theta <- theta + (I + s L)^-1 G

L takes second differences over the weights in their order, on a circle: (L v)_j = 2 v_j - v_{j-1} - v_{j+1}. Smoothing
reduces noise that is independent from weight to weight. It is computed by FFT, in which L is diagonal with entries
2 - 2 cos(2 pi k / d), and it is post-processing: it costs no privacy.
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


def smooth(values: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    """(I + s L)^-1 v for every row v. One row at a time, so that a lane does not depend on the number of lanes."""
    size = values.shape[1]
    frequencies = torch.arange(size // 2 + 1, dtype=torch.float64, device=values.device) * (2 * math.pi / size)
    laplacian = 2 - 2 * torch.cos(frequencies)
    rows = [
        torch.fft.irfft(torch.fft.rfft(row.double()) / (1 + s.double() * laplacian), n=size)
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
        Hyperparameter("smoothing", 1.0, "s, strength of the Laplacian smoothing; 0: none", low=0),
        weight_decay(1e-3),
        *SAMPLING,
    )

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return SGDSteps.of(hypers)

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        return theta + smooth(G, hypers["smoothing"])
