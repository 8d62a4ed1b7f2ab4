"""DP-FedFC: once, a noisy covariance of clipped features; then theta - eta (Cov + gamma I)^-1 G.

The covariance is a release like any other: features are clipped to `feature_clip`, it gets `covariance_share` of the
budget (of mu squared), and its noise shrinks with |D_i| as the gradients' does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trainables.methods.base import ClientProgram, ClientRound, Hyperparameter, Hypers, Method, State, learning_rate
from trainables.privacy.plan import Event, PrivacySettings


@dataclass(frozen=True)
class CovarianceThenGradient(ClientProgram):
    feature_clip: float

    @property
    def name(self) -> str:
        return f"covariance of features clipped to {self.feature_clip:g}, then noisy gradient"

    def prepare(self, client: ClientRound) -> torch.Tensor:
        gram = client.clipped_gram(self.feature_clip)
        return (gram.unsqueeze(1) + client.distinct_noise("covariance", gram.shape[1])) / client.size

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return self.noisy_gradient(client, theta)


class DPFedFC(Method):
    name = "dp-fedfc"
    title = "DP-FedFC"
    paper = "Mehta et al. 2023; Krouka et al. 2025 (baseline of DP-FedSOFIM, arXiv:2601.09166)"
    hyperparameters = (
        learning_rate(0.3),
        Hyperparameter("gamma", 1.0, "added to the covariance's eigenvalues", low=0, open_low=True),
        Hyperparameter(
            "feature_clip", 10.0, "l2 bound on a feature vector in the covariance", low=0, open_low=True, shared=True
        ),
        Hyperparameter(
            "covariance_share",
            0.1,
            "the covariance's part of the budget, of mu squared",
            low=0,
            high=1,
            open_low=True,
            open_high=True,
        ),
    )

    def program(self, hypers: Hypers) -> ClientProgram:
        return CovarianceThenGradient(float(hypers["feature_clip"]))

    def releases(self, privacy: PrivacySettings, rounds: int, hypers: Hypers) -> tuple[Event, ...]:
        share, bound = float(hypers["covariance_share"]), float(hypers["feature_clip"])
        # ||x x^T||_F = ||x||^2, and two such matrices are at most sqrt(2) of that apart
        moves = bound**2 * (math.sqrt(2) if privacy.adjacency == "replace-one" else 1.0)
        return (
            Event("gradient", rounds, privacy.record_sensitivity, share=1 - share),
            Event("covariance", 1, moves, share=share),
        )

    def receive(self, prepared: torch.Tensor, which: torch.Tensor, state: State, hypers: Hypers) -> None:
        """Noise can make the mean asymmetric and indefinite; mending that is post-processing and costs nothing."""
        side = math.isqrt(prepared.shape[1])
        covariance = prepared.view(-1, side, side)
        finite = torch.isfinite(covariance).all(dim=2).all(dim=1).view(-1, 1, 1)  # eigh would stop the whole pack
        usable = torch.where(finite, (covariance + covariance.mT) / 2, torch.eye(side).to(covariance))
        values, vectors = torch.linalg.eigh(usable)
        values = torch.where(finite.squeeze(2), values.clamp(min=0), math.nan)
        state["values"], state["vectors"] = values[which], vectors[which]

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        values, vectors = state["values"], state["vectors"]
        gradient = G.view(G.shape[0], values.shape[1], -1)
        turned = (vectors.mT @ gradient) / (values + hypers["gamma"]).unsqueeze(2)
        return theta - hypers["learning_rate"] * (vectors @ turned).flatten(1)
