"""What DP-FedNew and its covariance variant share: one step of ADMM towards the Newton direction, every round.

    y_i = (H_i + gamma I)^-1 (g_i - lambda_i + rho y),  gamma = alpha + rho, is released with noise as y~_i;
    y = mean of y~_i,  theta - eta y,  lambda_i += rho (y~_i - y).

Record level: the rows' gradients are clipped to C1 (the run's clip), their Hessians to `hessian_clip` and the sum in
brackets, as a whole, to `sum_clip`. At user level only the outcome y_i is clipped, to the run's clip.
"""

from __future__ import annotations

import math
from abc import abstractmethod
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
from trainables.models.softmax import SoftmaxHead
from trainables.privacy.plan import LEVELS, Event, Level


@dataclass(frozen=True)
class PrimalUpdate(ClientProgram):
    """The client half; which curvature H_i it has, a subclass says."""

    level: Level
    hessian_clip: float
    duals: bool
    scaled: bool
    """Whether lemma 4 bounds the sum in brackets, as published, rather than clipping."""
    hypers: ClassVar[tuple[str, ...]] = ("alpha", "rho", "sum_clip")
    curvature: ClassVar[str]

    @property
    def name(self) -> str:
        bound = "" if self.level == "user" else f" clipped to {self.hessian_clip!r}"
        words = [f"primal update of a {self.level} with {self.curvature}{bound}"]
        words += ["duals"] * self.duals + ["lemma 4"] * self.scaled
        return ", ".join(words)

    @property
    def stateful(self) -> bool:
        return self.duals

    @abstractmethod
    def solve(self, client: ClientRound, theta: torch.Tensor, right: torch.Tensor, bound: float) -> torch.Tensor:
        """(H_i + gamma I)^-1 applied to the right-hand sides, the rows' Hessians clipped to `bound`."""

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        rho, y = client.hypers["rho"], client.broadcast["y"]
        if not self.duals:
            return self.primal(client, theta, rho * y)
        dual = client.state.get("dual", client.zeros()) - rho * y  # the last update's other half, now that y is known
        release = self.primal(client, theta, rho * y - dual)
        client.state["dual"] = dual + rho * release
        return release

    def primal(self, client: ClientRound, theta: torch.Tensor, pull: torch.Tensor) -> torch.Tensor:
        """y~_i, given rho y - lambda_i."""
        if self.level == "user":
            y = self.solve(client, theta, client.gradient_mean(theta) + pull, math.inf)
            return clip_norm(y, client.clip) + client.noise("primal")
        gradient = (client.clipped_gradient_sum(theta) / client.size).to(pull.dtype)
        bound = client.hypers["sum_clip"]
        right = scaled_sum(gradient, pull, bound) if self.scaled else clip_norm(gradient + pull, bound)
        y = self.solve(client, theta, right, self.hessian_clip)  # in float64, until the noise is in it
        return (y + client.noise("primal") / client.size).to(theta)


def scaled_sum(gradient: torch.Tensor, pull: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Lemma 4: gradient + xi pull with the xi > 0 that makes its norm the bound, where xi = 1 makes it longer."""
    length = torch.linalg.vector_norm(pull, dim=-1, keepdim=True)
    direction = pull / length.clamp(min=torch.finfo(pull.dtype).tiny)
    along = (gradient * direction).sum(-1, keepdim=True)
    room = bound.square() - gradient.square().sum(-1, keepdim=True)
    longest = (along.square() + room).clamp(min=0).sqrt() - along
    return gradient + torch.minimum(length, longest) * direction


def lemma3(gradients: float, hessian_clip: float, sum_clip: float, gamma: float, size: int) -> float:
    """How far one record more or less moves |D_i| y_i: by its gradient, then by its Hessian."""
    return gradients / gamma + hessian_clip * sum_clip / (gamma**2 - gamma * hessian_clip / size)


def stretch(clip: float, sum_clip: float, size: int) -> float:
    """By how much lemma 4's scaling can widen the move clip / |D_i| of a mean gradient.

    It keeps the part v of g that is orthogonal to b = rho y - lambda_i, and along b it gives min(g_b + ||b||, f(v)),
    f(v) = sqrt(C2^2 - ||v||^2). Where C1 < C2 the whole has a slope of at most C2 / sqrt(C2^2 - C1^2); in any case
    |f(v) - f(w)| <= sqrt(| ||v||^2 - ||w||^2 |). One record more makes a mean gradient as long as C1 (1 + 1/|D_i|).
    """
    room = sum_clip**2 - (clip * (1 + 1 / size)) ** 2
    return min(sum_clip / math.sqrt(room) if room > 0 else math.inf, math.sqrt(2 * size + 3))


class FedNewMethod(Method):
    levels = LEVELS
    second_order = True
    hyperparameters = (
        learning_rate(1.0),
        Hyperparameter("alpha", 0.1, "added to the Hessian's eigenvalues, with rho", low=0, open_low=True),
        Hyperparameter("rho", 1.0, "pull of the clients' directions towards their mean", low=0, open_low=True),
        Hyperparameter("hessian_clip", 1.0, "Frobenius bound on a record's Hessian", low=0, open_low=True, shared=True),
        Hyperparameter("sum_clip", 1.0, "C2, l2 bound on g_i - lambda_i + rho y", low=0, open_low=True),
        Hyperparameter("duals", True, "lambda_i: no credit from secure aggregation", shared=True, boolean=True),
        as_released("lemma 4, duals, and secure aggregation credited all the same"),
    )

    def accepts(self, model: Model) -> bool:
        return isinstance(model, SoftmaxHead)

    @abstractmethod
    def update(self, level: Level, hessian_clip: float, duals: bool, scaled: bool) -> PrimalUpdate:
        """The client half with this method's curvature."""

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        released = bool(hypers["as_released"])
        scaled = released and level == "record"
        return self.update(level, float(hypers["hessian_clip"]), bool(hypers["duals"]) or released, scaled)

    def releases(self, run: Run) -> tuple[Event, ...]:
        """lambda_i holds what secure aggregation hides, the client's noise and data: later releases then follow more
        than the sums that everybody has seen, and only the account of the local model holds."""
        published, proven = self.sensitivities(run)
        if not run.hypers["as_released"]:
            return (Event("primal", run.rounds, published, aggregated=not run.hypers["duals"]),)
        together = math.sqrt(len(run.sizes)) if run.privacy.release == "secure-aggregation" else 1.0
        return (Event("primal", run.rounds, proven, aggregated=False, calibrated_for=published / together),)

    def bound_only(self, hypers: Hypers) -> bool:
        return bool(hypers["as_released"])

    def sensitivities(self, run: Run) -> tuple[float, float]:
        """That of the paper, and what can be proven of lemma 4's scaling."""
        if run.privacy.level == "user":
            return run.privacy.sensitivity, run.privacy.sensitivity
        names = ("alpha", "rho", "hessian_clip", "sum_clip")
        alpha, rho, hessian_clip, sum_clip = (float(run.hypers[name]) for name in names)
        clip, gamma, smallest = run.privacy.clip, alpha + rho, min(run.sizes)
        if gamma <= hessian_clip / smallest:
            raise UserError(
                f"alpha = {alpha:g} and rho = {rho:g} must add up to more than hessian_clip / |D_i| = "
                f"{hessian_clip / smallest:g}, for the smallest client has {smallest} rows"
            )
        if run.hypers["as_released"] and clip > sum_clip:
            raise UserError(f"sum_clip = {sum_clip:g} is below clip = {clip:g}: lemma 4 has no solution then")
        published = lemma3(clip, hessian_clip, sum_clip, gamma, smallest)
        proven = max(
            lemma3(clip * stretch(clip, sum_clip, size), hessian_clip, sum_clip, gamma, size) for size in run.sizes
        )
        return run.privacy.adjacency_factor * published, run.privacy.adjacency_factor * proven

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        return {"y": torch.zeros_like(theta)}

    def broadcast(self, state: State, hypers: Hypers) -> dict[str, torch.Tensor]:
        return {"y": state["y"]}

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        state["y"] = G
        return theta - hypers["learning_rate"] * G
