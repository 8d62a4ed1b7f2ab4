"""DP-FedNew-FC: DP-FedNew with the feature covariance in place of the Hessian, H_i = I kron (mean of x x^T).

H_i does not depend on the weights, so one eigendecomposition serves all rounds and all lanes with the same centre.
"""

from __future__ import annotations

import math

from trainables.lazy import torch
from trainables.methods.base import ClientRound
from trainables.methods.fednew import FedNewMethod, PrimalUpdate
from trainables.models.lanes import SHAPES, from_blocks, to_blocks, vector_to_blocks
from trainables.privacy.plan import Level


class CovarianceUpdate(PrimalUpdate):
    curvature = "the covariance"

    def solve(self, client: ClientRound, theta: torch.Tensor, right: torch.Tensor, bound: float) -> torch.Tensor:
        solutions = torch.empty_like(right)
        gamma = (client.hypers["alpha"] + client.hypers["rho"]).squeeze(1)
        for lanes, rows in client.rows_by_centre():
            spectrum = rows.spectrum(math.sqrt(bound))  # ||x x^T||_F = ||x||^2
            solutions[:, lanes] = solve(*spectrum, gamma[lanes], right[:, lanes])
        return solutions


def solve(values: torch.Tensor, vectors: torch.Tensor, gamma: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(A + gamma I)^-1 times the right-hand sides as (features, classes) matrices; A = V diag(values) V^T."""
    values, vectors = values.to(right), vectors.to(right)
    lanes, rows = SHAPES[right.device.type].lanes, vectors.shape[1]
    classes = right.shape[-1] // rows
    blocks = to_blocks(right, rows, classes, lanes)
    for block, damping in zip(blocks, vector_to_blocks(gamma, lanes).repeat(1, classes), strict=True):
        block.copy_(vectors @ ((vectors.mT @ block) / (values.unsqueeze(2) + damping)))
    return from_blocks(blocks, classes, lanes, right.shape[1])


class DPFedNewFC(FedNewMethod):
    name = "dp-fednew-fc"
    title = "DP-FedNew-FC"
    paper = "Krouka, Koskela and Kulkarni 2025, PoPETs 2025(1)"

    def update(self, level: Level, hessian_clip: float, duals: bool, scaled: bool) -> PrimalUpdate:
        return CovarianceUpdate(level, hessian_clip, duals, scaled)
