"""DP-FedFC: once, a noisy covariance of clipped features; then theta - eta (Cov + gamma I)^-1 G.

The covariance is a release like any other: features are clipped to `feature_clip`, it gets `covariance_share` of the
budget (of mu squared), and its noise shrinks with |D_i| as the gradients' does. At user level the clients precondition
their own gradients, clip the outcome and add noise to it.
`as_released`: features are not clipped, the covariance is not accounted, its noise does not shrink with |D_i|. How much
noise the authors added there is not known; here it is what a bound of 1 would need at the gradients' multiplier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from trainables.errors import UserError
from trainables.lazy import torch
from trainables.methods.base import (
    ClientProgram,
    ClientRound,
    Hyperparameter,
    Hypers,
    Method,
    Run,
    State,
    as_released,
    clip_norm,
    learning_rate,
)
from trainables.models import Model
from trainables.models.lanes import in_fixed_blocks
from trainables.models.softmax import SoftmaxHead
from trainables.privacy.plan import LEVELS, Event, Level


def preconditioned(
    values: torch.Tensor, vectors: torch.Tensor, gamma: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """(V diag(values) V^T + gamma I)^-1 applied to a gradient, feature by feature."""
    matrix = gradient.view(*gradient.shape[:-1], values.shape[-1], -1)
    damped = (values + gamma).unsqueeze(-1)
    if gradient.dim() > 2:  # of several clients at once
        return (vectors @ ((vectors.mT @ matrix) / damped)).flatten(-2)
    return in_fixed_blocks(lambda v, m, d: v @ ((v.mT @ m) / d), vectors, matrix, damped).flatten(-2)


@dataclass(frozen=True)
class CovarianceThenGradient(ClientProgram):
    feature_clip: float
    prepares = True

    @property
    def name(self) -> str:
        return f"covariance of features clipped to {self.feature_clip!r}, then noisy gradient"

    def prepare(self, client: ClientRound) -> torch.Tensor:
        gram = client.shard.gram(self.feature_clip)
        return (gram.unsqueeze(1) + client.distinct_noise("covariance", gram.shape[1])) / client.size

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return self.noisy_gradient(client, theta)


class ReleasedCovariance(CovarianceThenGradient):
    @property
    def name(self) -> str:
        return "covariance as released, then noisy gradient"

    def prepare(self, client: ClientRound) -> torch.Tensor:
        gram = client.shard.gram(math.inf)
        return gram.unsqueeze(1) / client.size + client.distinct_noise("covariance", gram.shape[1])


class UserCovariance(CovarianceThenGradient):
    hypers = ("gamma",)

    @property
    def name(self) -> str:
        return f"covariance of a user's features clipped to {self.feature_clip!r}, then preconditioned gradient"

    def prepare(self, client: ClientRound) -> torch.Tensor:
        gram = client.shard.gram(self.feature_clip) / client.size.squeeze(2)  # of norm at most the bound squared
        return gram.unsqueeze(1) + client.distinct_noise("covariance", gram.shape[1])

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        sent, gamma = client.broadcast, client.hypers["gamma"]
        direction = preconditioned(sent["values"], sent["vectors"], gamma, client.gradient_mean(theta))
        return clip_norm(direction, client.clip) + client.noise("gradient")


COVARIANCE = (
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
"""What methods with a noisy covariance have in common."""


def priced(run: Run) -> tuple[Event, ...]:
    """A gradient a round, and a covariance once."""
    share, bound = float(run.hypers["covariance_share"]), float(run.hypers["feature_clip"])
    # ||x x^T||_F = ||x||^2, and two such matrices are at most sqrt(2) of that apart
    moves = bound**2 * (math.sqrt(2) if run.privacy.adjacency == "replace-one" else 1.0)
    return (
        Event("gradient", run.rounds, run.privacy.sensitivity, share=1 - share),
        Event("covariance", 1, moves, share=share),
    )


class DPFedFC(Method):
    name = "dp-fedfc"
    title = "DP-FedFC"
    paper = "Mehta et al. 2023; Krouka et al. 2025 (baseline of DP-FedSOFIM, arXiv:2601.09166)"
    levels: ClassVar[tuple[Level, ...]] = LEVELS
    second_order = True
    hyperparameters: ClassVar[tuple[Hyperparameter, ...]] = (
        learning_rate(0.3),
        *COVARIANCE,
        as_released("features not clipped, the covariance not accounted and its noise the same for all |D_i|"),
    )

    def accepts(self, model: Model) -> bool:
        return isinstance(model, SoftmaxHead)

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        bound = float(hypers["feature_clip"])
        if level == "user":
            return UserCovariance(bound)
        return ReleasedCovariance(bound) if hypers["as_released"] else CovarianceThenGradient(bound)

    def releases(self, run: Run) -> tuple[Event, ...]:
        privacy, hypers = run.privacy, run.hypers
        if hypers["as_released"] and privacy.level == "user":
            raise UserError("as_released = True: dp-fedfc was released for record level alone")
        if hypers["as_released"]:
            return (
                Event("gradient", run.rounds, privacy.sensitivity),
                Event("covariance", 1, math.inf, calibrated_for=privacy.adjacency_factor * math.sqrt(run.rounds)),
            )
        return priced(run)

    def receive(self, prepared: torch.Tensor, which: torch.Tensor, state: State, hypers: Hypers) -> None:
        """Noise can make the mean asymmetric and indefinite; mending that is post-processing and costs nothing."""
        side = math.isqrt(prepared.shape[1])
        covariance = prepared.view(-1, side, side)
        finite = torch.isfinite(covariance).all(dim=2).all(dim=1).view(-1, 1, 1)  # eigh would stop the whole pack
        usable = torch.where(finite, (covariance + covariance.mT) / 2, torch.eye(side).to(covariance))
        values, vectors = torch.linalg.eigh(usable)
        values = torch.where(finite.squeeze(2), values.clamp(min=0), math.nan)
        state["values"], state["vectors"] = values[which], vectors[which]

    def broadcast(self, state: State, hypers: Hypers) -> dict[str, torch.Tensor]:
        return {name: state[name] for name in ("values", "vectors")} if hypers["level"] == "user" else {}

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        if hypers["level"] == "record":  # users have done it themselves
            G = preconditioned(state["values"], state["vectors"], hypers["gamma"], G)
        return theta - hypers["learning_rate"] * G
