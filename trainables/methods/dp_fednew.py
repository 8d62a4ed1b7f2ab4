"""DP-FedNew: damped Newton directions of the clients, coupled by ADMM (see `fednew`). H_i is the clipped Hessian."""

from __future__ import annotations

from typing import cast

from trainables.lazy import torch
from trainables.methods.base import ClientRound
from trainables.methods.fednew import FedNewMethod, PrimalUpdate
from trainables.models.curvature import by_class, by_row, clipped_hessian_sum
from trainables.models.softmax import SoftmaxHead
from trainables.privacy.plan import Level


class HessianUpdate(PrimalUpdate):
    curvature = "the Hessian"

    def solve(self, client: ClientRound, theta: torch.Tensor, right: torch.Tensor, bound: float) -> torch.Tensor:
        """One lane at a time: a lane does not depend on the others, and memory holds one Hessian."""
        solutions = torch.empty_like(right)
        classes = right.shape[-1] // cast(SoftmaxHead, client.model).rows
        gamma = (client.hypers["alpha"] + client.hypers["rho"]).double()
        for lanes, rows in client.rows_by_centre():
            for lane in torch.arange(len(theta))[lanes].tolist():
                hessian = (clipped_hessian_sum(rows, theta[lane], bound) / client.size).double()
                hessian.diagonal(dim1=1, dim2=2).add_(gamma[lane])
                factor, _ = torch.linalg.cholesky_ex(hessian)  # does not raise if a lane has diverged
                solution = torch.cholesky_solve(by_class(right[:, lane], classes).double().unsqueeze(2), factor)
                solutions[:, lane] = by_row(solution.squeeze(2), classes)
        return solutions


class DPFedNew(FedNewMethod):
    name = "dp-fednew"
    title = "DP-FedNew"
    paper = "Krouka, Koskela and Kulkarni 2025, PoPETs 2025(1)"

    def update(self, level: Level, hessian_clip: float, duals: bool, scaled: bool) -> PrimalUpdate:
        return HessianUpdate(level, hessian_clip, duals, scaled)
