"""The part that DP-FedNew and DP-FedNew-FC share: one ADMM step towards the Newton direction in every round.

    1. client i:  y_i = (H_i + gamma I)^-1 b_i,  b_i = g_i - lambda_i + rho y,  gamma = alpha + rho;
                  the release is y~_i = y_i + noise
    2. server:    y = mean of y~_i,  theta <- theta - eta y
    3. client i:  lambda_i <- lambda_i + rho (y~_i - y)

g_i is the mean gradient and H_i the curvature, which a subclass defines; lambda_i is the dual variable.
Record level: gradients are clipped to C1 (the run's clip), per-example Hessians to `hessian_clip`, and b_i to C2
(`sum_clip`). User level: only y_i is clipped, to the run's clip.
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
    """The client program; a subclass defines H_i."""

    level: Level
    hessian_clip: float
    duals: bool
    scaled: bool
    """Whether b_i is bounded by lemma 4, as published, instead of clipping."""
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
        """(H_i + gamma I)^-1 times the right-hand sides, with per-example Hessians clipped to `bound`."""

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        rho, y = client.hypers["rho"], client.broadcast["y"]
        if not self.duals:
            return self.primal(client, theta, rho * y)
        dual = client.state.get("dual", client.zeros()) - rho * y  # completes the previous round's step 3
        release = self.primal(client, theta, rho * y - dual)
        client.state["dual"] = dual + rho * release
        return release

    def primal(self, client: ClientRound, theta: torch.Tensor, pull: torch.Tensor) -> torch.Tensor:
        """y~_i, given pull = rho y - lambda_i."""
        if self.level == "user":
            y = self.solve(client, theta, client.gradient_mean(theta) + pull, math.inf)
            return clip_norm(y, client.clip) + client.noise("primal")
        # in float64 until noise has been added: rounding a mean of many rows could reveal a record
        gradient = client.clipped_gradient_sum(theta) / client.size
        bound = client.hypers["sum_clip"]
        right = scaled_sum(gradient, pull, bound) if self.scaled else clip_norm(gradient + pull, bound)
        y = self.solve(client, theta, right, self.hessian_clip)
        return (y + client.noise("primal") / client.size).to(theta)


def scaled_sum(gradient: torch.Tensor, pull: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Lemma 4: gradient + xi pull. xi = 1 if the norm of the sum is then within the bound; else xi is such that the
    norm equals the bound."""
    length = torch.linalg.vector_norm(pull, dim=-1, keepdim=True)
    direction = pull / length.clamp(min=torch.finfo(pull.dtype).tiny)
    along = (gradient * direction).sum(-1, keepdim=True)
    room = bound.square() - gradient.square().sum(-1, keepdim=True)
    longest = (along.square() + room).clamp(min=0).sqrt() - along
    return gradient + torch.minimum(length, longest) * direction


def lemma3(gradients: float, hessian_clip: float, sum_clip: float, gamma: float, size: int) -> float:
    """Sensitivity of |D_i| y_i to adding or removing a record: through its gradient, and through its Hessian."""
    return gradients / gamma + hessian_clip * sum_clip / (gamma**2 - gamma * hessian_clip / size)


def stretch(clip: float, sum_clip: float, size: int) -> float:
    """Factor by which lemma 4's scaling can increase the sensitivity C1 / |D_i| of a mean gradient g.

    Let p = rho y - lambda_i. Scaling keeps the component v of g orthogonal to p, and changes the component g_p along p
    to min(g_p + ||p||, f(v)) with f(v) = sqrt(C2^2 - ||v||^2). If C1 < C2, the Lipschitz constant of this map is at
    most C2 / sqrt(C2^2 - C1^2). In any case |f(v) - f(w)| <= sqrt(| ||v||^2 - ||w||^2 |). A further record can make
    ||g|| as large as C1 (1 + 1/|D_i|).
    """
    room = sum_clip**2 - (clip * (1 + 1 / size)) ** 2
    return min(sum_clip / math.sqrt(room) if room > 0 else math.inf, math.sqrt(2 * size + 3))


class FedNewMethod(Method):
    levels = LEVELS
    second_order = True
    hyperparameters = (
        learning_rate(1.0),
        Hyperparameter("alpha", 0.1, "alpha + rho is added to the Hessian's eigenvalues", low=0, open_low=True),
        Hyperparameter(
            "rho", 1.0, "ADMM penalty, which pulls the clients' directions towards their mean", low=0, open_low=True
        ),
        Hyperparameter("hessian_clip", 1.0, "Frobenius bound on a record's Hessian", low=0, open_low=True, shared=True),
        Hyperparameter("sum_clip", 1.0, "C2, l2 bound on g_i - lambda_i + rho y", low=0, open_low=True),
        Hyperparameter(
            "duals",
            True,
            "use the dual variables lambda_i; secure aggregation then gets no credit",
            shared=True,
            boolean=True,
        ),
        as_released("lemma 4 and duals, with credit for secure aggregation"),
    )

    needs = "softmax, whose curvature it uses"

    def accepts(self, model: Model) -> bool:
        return isinstance(model, SoftmaxHead)

    @abstractmethod
    def update(self, level: Level, hessian_clip: float, duals: bool, scaled: bool) -> PrimalUpdate:
        """The client program with this method's curvature."""

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        released = bool(hypers["as_released"])
        scaled = released and level == "record"
        return self.update(level, float(hypers["hessian_clip"]), bool(hypers["duals"]) or released, scaled)

    def releases(self, run: Run) -> tuple[Event, ...]:
        """With duals, secure aggregation gets no credit: lambda_i contains the client's own noise and data, so later
        releases depend on more than the public sums, and only the account for local release holds."""
        published, proven = self.sensitivities(run)
        if not run.hypers["as_released"]:
            return (Event("primal", run.rounds, published, aggregated=not run.hypers["duals"]),)
        together = math.sqrt(len(run.sizes)) if run.privacy.release == "secure-aggregation" else 1.0
        return (Event("primal", run.rounds, proven, aggregated=False, calibrated_for=published / together),)

    def bound_only(self, hypers: Hypers) -> bool:
        return bool(hypers["as_released"])

    def sensitivities(self, run: Run) -> tuple[float, float]:
        """The sensitivity in the paper, and the one that can be proven for lemma 4's scaling."""
        if run.privacy.level == "user":
            return run.privacy.sensitivity, run.privacy.sensitivity
        names = ("alpha", "rho", "hessian_clip", "sum_clip")
        alpha, rho, hessian_clip, sum_clip = (float(run.hypers[name]) for name in names)
        clip, gamma, smallest = run.privacy.clip, alpha + rho, min(run.sizes)
        if gamma <= hessian_clip / smallest:
            raise UserError(
                f"method {self.name}: alpha = {alpha:g} and rho = {rho:g} must add up to more than "
                f"hessian_clip / |D_i| = {hessian_clip / smallest:g}; the smallest client has "
                f"{smallest} row{'s' if smallest > 1 else ''}"
            )
        if run.hypers["as_released"] and clip > sum_clip:
            raise UserError(f"sum_clip = {sum_clip:g} is below clip = {clip:g}: lemma 4 then has no solution")
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
