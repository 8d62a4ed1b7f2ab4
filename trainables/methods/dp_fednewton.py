"""DP-FedNewton: a start by FedAvg, then the mean of the clients' own Newton steps; one such step is what it is for.

A client's step is -H^-1 g with a noisy gradient and a noisy Hessian, per-example Hessians clipped in Frobenius norm.
Both are priced as releases of their own: what is sent is computed from them alone. Since it bends the client's own
noise, the other clients' noise is given no credit for hiding it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from trainables.lazy import torch
from trainables.methods.base import ClientProgram, ClientRound, Hyperparameter, Hypers, Run, State
from trainables.methods.fedavg_start import FedAvgStart, FedAvgStartMethod, share
from trainables.models import Model
from trainables.models.glm import GLM
from trainables.privacy.plan import Event, Level


def solved(H: torch.Tensor, g: torch.Tensor, smallest: torch.Tensor) -> torch.Tensor:
    """H^-1 g, after H has been made symmetric and its eigenvalues at least `smallest`: noise can make it indefinite,
    and mending what was released costs nothing. Not a number where H is not one: eigh would stop the whole pack."""
    finite = torch.isfinite(H).all(dim=-1).all(dim=-1)[..., None, None]
    usable = torch.where(finite, (H + H.mT) / 2, torch.eye(H.shape[-1]).to(H))
    values, vectors = torch.linalg.eigh(usable)
    inverse = torch.where(finite.squeeze(-1), 1 / torch.maximum(values, smallest), math.nan)
    # sums, not products of matrices, which might round by the number of lanes
    turned = (vectors * g.unsqueeze(-1)).sum(-2) * inverse
    return (vectors * turned.unsqueeze(-2)).sum(-1)


@dataclass(frozen=True)
class FedAvgThenNewton(FedAvgStart):
    hypers = ("client_learning_rate", "hessian_clip", "smallest_eigenvalue")
    refinement = "noisy Newton step"

    def refine(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        g = self.noisy_gradient(client, theta)
        side = theta.shape[-1]
        bound = client.hypers["hessian_clip"].squeeze(1)
        total = cast(GLM, client.model).clipped_hessian_sum(client.shard, theta, bound)
        noise = client.noise("hessian", size=side * side).unflatten(-1, (side, side))
        H = ((total + noise) / client.size.unsqueeze(-1)).to(theta)
        return -solved(H, g, client.hypers["smallest_eigenvalue"])


class DPFedNewton(FedAvgStartMethod):
    name = "dp-fednewton"
    title = "DP-FedNewton"
    paper = "Auddy, Paul and Peng 2026, arXiv:2605.18656"
    second_order = True
    hyperparameters = (
        *FedAvgStartMethod.start_hyperparameters,
        share("hessian_share", 0.5, "the Hessians' part of what FedAvg leaves of the budget, of mu squared"),
        Hyperparameter("hessian_clip", 1.0, "Frobenius bound on a per-example Hessian", low=0, open_low=True),
        Hyperparameter(
            "smallest_eigenvalue", 0.01, "what a noisy Hessian's eigenvalues are raised to", low=0, open_low=True
        ),
    )

    def accepts(self, model: Model) -> bool:
        return isinstance(model, GLM)

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return FedAvgThenNewton(int(hypers["local_steps"]), int(hypers["fedavg_rounds"]))

    def releases(self, run: Run) -> tuple[Event, ...]:
        start = self.start_event(run)
        rounds = run.rounds - int(run.hypers["fedavg_rounds"])
        left, of_hessians = 1 - start.share, float(run.hypers["hessian_share"])
        # Hessians are positive semi-definite, so two of them are at most sqrt(2) of their bound apart
        moves = float(run.hypers["hessian_clip"]) * (math.sqrt(2) if run.privacy.adjacency == "replace-one" else 1.0)
        return (
            start,
            Event("gradient", rounds, run.privacy.sensitivity, share=left * (1 - of_hessians), aggregated=False),
            Event("hessian", rounds, moves, share=left * of_hessians, aggregated=False),
        )

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        return theta + G
