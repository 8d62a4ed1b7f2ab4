"""DP-LS: private least squares in round 1; in later rounds, Newton steps with a fixed bound on the Hessian.

    before round 1:  clients release A_i = (sum of x x^T over clipped rows + noise) / |D_i|;  A = mean
    round 1:         theta = -eta c (A + gamma I)^-1 G,            G = mean noisy gradient at zero weights
    round t > 1:     theta <- theta - 2 eta (A + gamma I)^-1 G,    G = mean noisy gradient at theta

Round 1 is least squares: with c classes the gradient at zero weights is x (1/c - y)^T, so -(A + gamma I)^-1 G is the
least-squares fit of y - 1/c. It is also a Newton step: at zero weights the Hessian of the softmax loss is A / c, up to
a direction that changes no prediction, hence the factor c. Later rounds use A / 2, which bounds the Hessian at every
theta (Bohning 1992): without noise and clipping a step with eta = 1 never increases the loss.

With `rounds: 1` clients release only two noisy sums, which share the whole budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainables.lazy import torch
from trainables.methods.base import ClientProgram, ClientRound, Hypers, Run, State, learning_rate
from trainables.methods.dp_fedfc import COVARIANCE, CovarianceThenGradient, DPFedFC, covariance_events, precondition
from trainables.privacy.plan import Event, Level


@dataclass(frozen=True)
class LeastSquares(CovarianceThenGradient):
    @property
    def name(self) -> str:
        return f"covariance of features clipped to {self.feature_clip!r}, then noisy gradient, at first of zero weights"

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return self.noisy_gradient(client, torch.zeros_like(theta) if client.t == 1 else theta)


class DPLS(DPFedFC):
    name = "dp-ls"
    title = "DP-LS"
    paper = "least squares from noisy moments (Vu & Slavkovic 2009); Newton steps with Bohning's bound (1992)"
    levels = ("record",)
    hyperparameters = (learning_rate(1.0), *COVARIANCE)

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return LeastSquares(float(hypers["feature_clip"]))

    def releases(self, run: Run) -> tuple[Event, ...]:
        return covariance_events(run)

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        step = hypers["learning_rate"] * precondition(state["values"], state["vectors"], hypers["gamma"], G)
        return -hypers["model"].classes * step if t == 1 else theta - 2 * step
