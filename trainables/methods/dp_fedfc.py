"""DP-FedFC: gradient descent preconditioned with a noisy covariance of the features, released once.

    before round 1:  clients release A_i = (sum of x x^T + noise) / |D_i|, every x clipped to `feature_clip`;  A = mean
    every round:     theta <- theta - eta (A + gamma I)^-1 G

A spends `covariance_share` of the budget (of mu squared). At user level, noise is added to the mean of x x^T, after the
division by |D_i|; in every round, each client applies (A + gamma I)^-1 to its own mean gradient, clips the result and
adds noise, and the server's step is theta <- theta - eta G.

`as_released`: features are not clipped, so the actual eps is infinite. The claimed eps leaves A out, and the noise of A
does not shrink with |D_i|. The authors' noise level for A is unknown; here it is that of sensitivity 1 at the
gradients' noise multiplier.
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
from trainables.models.curvature import symmetric_eigh
from trainables.models.lanes import in_fixed_blocks
from trainables.models.softmax import SoftmaxHead
from trainables.privacy.plan import LEVELS, Event, Level


def precondition(
    values: torch.Tensor, vectors: torch.Tensor, gamma: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """(A + gamma I)^-1 times the gradient as a (features, classes) matrix; A = V diag(values) V^T."""
    matrix = gradient.view(*gradient.shape[:-1], values.shape[-1], -1)
    damped = (values + gamma).unsqueeze(-1)
    if gradient.dim() > 2:  # several clients at once
        return (vectors @ ((vectors.mT @ matrix) / damped)).flatten(-2)
    return in_fixed_blocks(lambda v, m, d: v @ ((v.mT @ m) / d), vectors, matrix, damped).flatten(-2)


@dataclass(frozen=True)
class CovarianceThenGradient(ClientProgram):
    """Record level: A_i once, then one noisy gradient a round."""

    feature_clip: float
    prepares = True

    @property
    def name(self) -> str:
        return f"covariance of features clipped to {self.feature_clip!r}, then noisy gradient"

    def prepare(self, client: ClientRound) -> torch.Tensor:
        gram = client.for_distinct_noises(lambda rows: rows.gram(self.feature_clip))
        return (gram + client.distinct_noise("covariance", gram.shape[2])) / client.size

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return self.noisy_gradient(client, theta)


class ReleasedCovariance(CovarianceThenGradient):
    @property
    def name(self) -> str:
        return "covariance as released, then noisy gradient"

    def prepare(self, client: ClientRound) -> torch.Tensor:
        gram = client.for_distinct_noises(lambda rows: rows.gram(math.inf))
        return gram / client.size + client.distinct_noise("covariance", gram.shape[2])


class UserCovariance(CovarianceThenGradient):
    hypers = ("gamma",)

    @property
    def name(self) -> str:
        return f"covariance of a user's features clipped to {self.feature_clip!r}, then preconditioned gradient"

    def prepare(self, client: ClientRound) -> torch.Tensor:
        gram = client.for_distinct_noises(lambda rows: rows.gram(self.feature_clip))
        # the mean's Frobenius norm is at most feature_clip^2
        return gram / client.size + client.distinct_noise("covariance", gram.shape[2])

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        values, vectors = client.broadcast["values"], client.broadcast["vectors"]
        direction = precondition(values, vectors, client.hypers["gamma"], client.gradient_mean(theta))
        return clip_norm(direction, client.clip) + client.noise("gradient")


COVARIANCE = (
    Hyperparameter("gamma", 1.0, "added to the covariance's eigenvalues", low=0, open_low=True),
    Hyperparameter(
        "feature_clip", 10.0, "l2 bound on a feature vector in the covariance", low=0, open_low=True, shared=True
    ),
    Hyperparameter(
        "covariance_share",
        0.1,
        "the covariance's share of the budget (of mu squared)",
        low=0,
        high=1,
        open_low=True,
        open_high=True,
    ),
)
"""The hyperparameters of methods that release a noisy covariance."""


def covariance_events(run: Run) -> tuple[Event, ...]:
    """One gradient a round, and one covariance."""
    share, bound = float(run.hypers["covariance_share"]), float(run.hypers["feature_clip"])
    # ||x x^T||_F = ||x||^2, and two such matrices are at most sqrt(2) times that apart
    sensitivity = bound**2 * (math.sqrt(2) if run.privacy.adjacency == "replace-one" else 1.0)
    return (
        Event("gradient", run.rounds, run.privacy.sensitivity, share=1 - share),
        Event("covariance", 1, sensitivity, share=share),
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
        as_released("no clipping of features, no account of the covariance, the same noise for all |D_i|"),
    )

    needs = "softmax, whose curvature it uses"

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
            raise UserError("as_released = True: dp-fedfc was released for record level only")
        if hypers["as_released"]:
            return (
                Event("gradient", run.rounds, privacy.sensitivity),
                Event("covariance", 1, math.inf, calibrated_for=privacy.adjacency_factor * math.sqrt(run.rounds)),
            )
        return covariance_events(run)

    def receive(self, prepared: torch.Tensor, which: torch.Tensor, state: State, hypers: Hypers) -> None:
        """Noise can make A asymmetric and indefinite. Its repair is post-processing and costs no privacy."""
        side = math.isqrt(prepared.shape[1])
        values, vectors = symmetric_eigh(prepared.view(-1, side, side))
        state["values"], state["vectors"] = values.clamp(min=0)[which], vectors[which]

    def broadcast(self, state: State, hypers: Hypers) -> dict[str, torch.Tensor]:
        return {name: state[name] for name in ("values", "vectors")} if hypers["level"] == "user" else {}

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        if hypers["level"] == "record":  # at user level the clients have done it
            G = precondition(state["values"], state["vectors"], hypers["gamma"], G)
        return theta - hypers["learning_rate"] * G
