"""DP-FedNewton: rounds of FedAvg, then rounds (usually one) that average the clients' own Newton steps.

    first `fedavg_rounds` rounds:  DP-FedAvg
    later rounds:  client i releases -H_i^-1 g_i;  theta <- theta + mean

g_i is the client's noisy gradient and H_i its noisy Hessian, with per-example Hessians clipped in Frobenius norm. Both
are accounted as releases, and the Newton step is computed from them alone. The step transforms the noise of one
client, so the account is that of local release, also under secure aggregation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from trainables.lazy import torch
from trainables.methods.base import ClientProgram, ClientRound, Hyperparameter, Hypers, Run, State
from trainables.methods.fedavg_start import FedAvgStart, FedAvgStartMethod, share
from trainables.models import Model
from trainables.models.curvature import symmetric_eigh
from trainables.models.glm import GLM
from trainables.privacy.plan import Event, Level


def solve(H: torch.Tensor, g: torch.Tensor, smallest: torch.Tensor) -> torch.Tensor:
    """H^-1 g with H made symmetric and its eigenvalues raised to `smallest`; NaN where H is not finite.

    Noise can make H indefinite. Its repair is post-processing and costs no privacy."""
    values, vectors = symmetric_eigh(H)
    # sums, not matrix products, whose rounding may depend on the number of lanes
    rotated = (vectors * g.unsqueeze(-1)).sum(-2) * (1 / torch.maximum(values, smallest))
    return (vectors * rotated.unsqueeze(-2)).sum(-1)


@dataclass(frozen=True)
class FedAvgThenNewton(FedAvgStart):
    hypers = ("client_learning_rate", "hessian_clip", "smallest_eigenvalue")
    refinement = "noisy Newton step"

    def refine(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        g = self.noisy_gradient(client, theta)
        side = theta.shape[-1]
        bound = client.hypers["hessian_clip"].squeeze(1)
        model, total = cast(GLM, client.model), torch.empty(*g.shape, side, dtype=torch.float64, device=g.device)
        for lanes, rows in client.rows_by_centre():
            total[:, lanes] = model.clipped_hessian_sum(rows, theta[..., lanes, :], bound[lanes])
        noise = client.noise("hessian", size=side * side).unflatten(-1, (side, side))
        H = ((total + noise) / client.size.unsqueeze(-1)).to(theta)
        return -solve(H, g, client.hypers["smallest_eigenvalue"])


class DPFedNewton(FedAvgStartMethod):
    name = "dp-fednewton"
    title = "DP-FedNewton"
    paper = "Auddy, Paul and Peng 2026, arXiv:2605.18656"
    second_order = True
    hyperparameters = (
        *FedAvgStartMethod.start_hyperparameters,
        share("hessian_share", 0.5, "the Hessians' share of what FedAvg leaves of the budget (mu squared)"),
        Hyperparameter("hessian_clip", 1.0, "Frobenius bound on a per-example Hessian", low=0, open_low=True),
        Hyperparameter(
            "smallest_eigenvalue", 0.01, "lower bound on the eigenvalues of a noisy Hessian", low=0, open_low=True
        ),
    )

    needs = "logistic, multinomial or poisson, whose curvature it uses"

    def accepts(self, model: Model) -> bool:
        return isinstance(model, GLM)

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return FedAvgThenNewton(int(hypers["local_steps"]), int(hypers["fedavg_rounds"]))

    def releases(self, run: Run) -> tuple[Event, ...]:
        start = self.start_event(run)
        rounds = run.rounds - int(run.hypers["fedavg_rounds"])
        left, hessian_share = 1 - start.share, float(run.hypers["hessian_share"])
        # Hessians are positive semi-definite, so two of them are at most sqrt(2) times their bound apart
        sensitivity = float(run.hypers["hessian_clip"]) * (
            math.sqrt(2) if run.privacy.adjacency == "replace-one" else 1.0
        )
        return (
            start,
            Event("gradient", rounds, run.privacy.sensitivity, share=left * (1 - hessian_share), aggregated=False),
            Event("hessian", rounds, sensitivity, share=left * hessian_share, aggregated=False),
        )

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        return theta + G
