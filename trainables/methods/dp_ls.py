"""DP-LS: private least squares in one round; with more rounds, Newton steps with the same Hessian.

Once, every client releases the sum of x x^T over clipped rows with noise; in round 1 its noisy gradient at zero
weights. That gradient is the cross moments of rows and labels, x (1/c - y)^T, so -(Gram + gamma I)^-1 of it is the
least-squares fit of the labels less 1/c. At zero weights the Hessian of the softmax loss is Gram / c (but for a
direction that changes no prediction), so c times that fit is a Newton step from zero, which is what is taken: both
classify alike. In further rounds gradients at the new weights are met with Gram / 2, which is no less than the Hessian
anywhere (Bohning 1992): without noise and clipping a step of length 1 never makes the loss worse.

`rounds: 1` is plain least squares: nothing is released but two noisy sums, and all of the budget goes into them.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainables.lazy import torch
from trainables.methods.base import ClientProgram, ClientRound, Hypers, Run, State, learning_rate
from trainables.methods.dp_fedfc import COVARIANCE, CovarianceThenGradient, DPFedFC, preconditioned, priced
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
        return priced(run)

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        step = hypers["learning_rate"] * preconditioned(state["values"], state["vectors"], hypers["gamma"], G)
        return -hypers["model"].classes * step if t == 1 else theta - 2 * step
