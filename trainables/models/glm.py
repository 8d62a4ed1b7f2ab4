"""Generalised linear models, for many lanes at a time.

    gradient of row x:  x r^T,            norm ||x|| ||r||,              r = mean(eta) - y
    Hessian of row x:   (x x^T) kron A,   Frobenius norm ||x||^2 ||A||,  A = second derivatives of the loss in eta

eta = x^T W are the k linear predictors of the row. Gradients and Hessians are clipped in closed form. Training starts
at W = 0.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from trainables.lazy import torch
from trainables.models.centres import FLOAT32_ROWS, Sharing, for_any_centres
from trainables.models.clipping import factors_, scaled_norm
from trainables.models.lanes import SHAPES, add_tile_products, from_blocks, to_blocks, vector_to_blocks
from trainables.models.shard import Diagnostics, Shard

LARGEST_LOG_MEAN = 30.0  # avoids overflow at exp(88): such a Poisson gradient is clipped anyway, in the same direction


@dataclass(frozen=True)
class Chunk:
    """A range of rows of every client, and their linear predictors."""

    x: torch.Tensor
    """(clients, rows, q)"""
    norm: torch.Tensor
    """(clients, rows, 1 or lanes); infinite for padding rows."""
    y: torch.Tensor
    """(clients, rows, 1, 1)"""
    eta: torch.Tensor
    """(clients, rows, columns, lanes)"""

    def factor(self, bound: torch.Tensor, norm: torch.Tensor, automatic: bool = False) -> torch.Tensor:
        """The clipping factor of contributions with this norm; 0 for padding rows. (clients, rows, lanes)"""
        return factors_(norm, bound, automatic).where(torch.isfinite(self.norm), 0)


@dataclass(frozen=True)
class GLM(ABC):
    features: int

    # ---- the family, as functions of eta (clients, rows, columns, lanes) and y (clients, rows, 1, 1)

    @property
    @abstractmethod
    def columns(self) -> int:
        """k, the number of linear predictors."""

    @abstractmethod
    def residual(self, eta: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """mean(eta) - y, in the shape of eta."""

    @abstractmethod
    def curvature(self, eta: torch.Tensor) -> torch.Tensor:
        """A: (clients, rows, columns, columns, lanes)."""

    @abstractmethod
    def loss(self, eta: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The negative log-likelihood: (clients, rows, lanes)."""

    def correct(self, eta: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """Whether the prediction is the label, (clients, rows, lanes); None for counts."""
        return None

    # ---- shared by all families

    @property
    def rows(self) -> int:
        """q, the features and the constant."""
        return self.features + 1

    @property
    def width(self) -> int:
        return self.columns

    @property
    def dimension(self) -> int:
        return self.rows * self.columns

    @property
    def blocks(self) -> tuple[int, ...]:
        return (self.dimension,)

    def initial(self, seed: int) -> torch.Tensor:
        return torch.zeros(self.dimension)

    @for_any_centres
    def clipped_gradient_sum(
        self,
        shard: Shard,
        theta: torch.Tensor,
        clip: torch.Tensor,
        *,
        diagnose: bool = False,
        automatic: bool = False,
    ) -> tuple[torch.Tensor, Diagnostics | None]:
        lanes, count = SHAPES[theta.device.type].lanes, theta.shape[-2]
        weights, clips = self._blocks(shard, theta), vector_to_blocks(clip, lanes)
        norm_columns = vector_to_blocks(shard.norm_columns(count), lanes, padding=0)
        total = torch.zeros(weights.shape, dtype=torch.float64, device=theta.device)
        losses = torch.zeros(weights.shape[0], shard.clients, lanes, dtype=theta.dtype, device=theta.device)
        clipped = torch.zeros_like(losses)
        for block, W in enumerate(weights):
            for chunk in self._chunks(shard, W, self.columns, norm_columns[block]):
                residual = self.residual(chunk.eta, chunk.y)
                factor = chunk.factor(clips[block], chunk.norm * scaled_norm(residual, 2), automatic)
                clipped_residual = (residual * factor.unsqueeze(2)).flatten(2)
                if shard.centres is None:
                    total[block] += torch.bmm(chunk.x.mT, clipped_residual)
                else:
                    add_tile_products(total[block], chunk.x, clipped_residual, FLOAT32_ROWS)
                if diagnose:
                    real = torch.isfinite(chunk.norm)
                    losses[block] += self.loss(chunk.eta, chunk.y).where(real, 0).sum(1)
                    clipped[block] += ((factor < 1) & real).sum(1)
        gradient = from_blocks(total, self.columns, lanes, count)
        if not diagnose:
            return gradient, None
        loss, cut = (part.movedim(0, 1).flatten(1)[:, :count] for part in (losses, clipped))
        return gradient, Diagnostics(loss, cut)

    def sharing(self, shard: Shard, theta: torch.Tensor) -> Sharing:
        """How lanes with different centres share rows."""
        return "constant"

    def clipped_hessian_sum(self, shard: Shard, theta: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        """For every client and lane, the sum over rows of per-example Hessians clipped to Frobenius norm `bound`,
        (clients, lanes, d, d). Block (a, b) is a Gram matrix weighted by A_ab: no per-example Hessian is stored."""
        lanes, count, k = SHAPES[theta.device.type].lanes, theta.shape[-2], self.columns
        weights, bounds = self._blocks(shard, theta), vector_to_blocks(bound, lanes)
        shape = (weights.shape[0], shard.clients, lanes, self.rows, k, self.rows, k)
        total = torch.zeros(shape, dtype=torch.float64, device=theta.device)
        for block, W in enumerate(weights):
            for chunk in self._chunks(shard, W, self.dimension):
                A = self.curvature(chunk.eta)
                A = A * chunk.factor(bounds[block], chunk.norm**2 * scaled_norm(A, (2, 3)))[:, :, None, None]
                for a, b in itertools.combinations_with_replacement(range(k), 2):
                    weighted = chunk.x.unsqueeze(1) * A[:, :, a, b].movedim(2, 1).unsqueeze(3)
                    gram = chunk.x.mT.unsqueeze(1) @ weighted
                    total[block][:, :, :, a, :, b] += gram
                    if a != b:
                        total[block][:, :, :, b, :, a] += gram
        return total.movedim(0, 1).flatten(1, 2)[:, :count].flatten(4, 5).flatten(2, 3)

    def scores(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x @ weights.view(self.rows, self.columns)

    def evaluate(self, shard: Shard, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        lanes, count = SHAPES[theta.device.type].lanes, theta.shape[0]
        losses, correct = [], []
        for W in self._blocks(shard, theta):
            loss = torch.zeros(lanes, dtype=theta.dtype, device=theta.device)
            right = []
            for chunk in self._chunks(shard, W, self.columns):
                loss += self.loss(chunk.eta, chunk.y)[0].sum(0)
                right.append(self.correct(chunk.eta, chunk.y))
            losses.append(loss)
            correct.append([part[0].T for part in right if part is not None])
        mean = torch.cat(losses)[:count] / shard.rows
        if not correct[0]:
            return mean, None
        return mean, torch.cat([torch.cat(parts, dim=1) for parts in correct])[:count]

    def _blocks(self, shard: Shard, theta: torch.Tensor) -> torch.Tensor:
        """(lanes, d) or (clients, lanes, d) as (block, client, row, column x lane)."""
        per_client = theta if theta.dim() == 3 else theta.unsqueeze(0)
        lanes = SHAPES[theta.device.type].lanes
        return to_blocks(per_client, self.rows, self.columns, lanes).expand(-1, shard.clients, -1, -1)

    def _chunks(
        self, shard: Shard, W: torch.Tensor, width: int, norm_columns: torch.Tensor | None = None
    ) -> Iterator[Chunk]:
        """`width`: intermediate numbers per row and lane. `norm_columns`: the column of `Shard.norm` that each lane of
        the block uses; None: the same for all lanes."""
        step = SHAPES[W.device.type].rows(width, shard.clients)
        for start in range(0, shard.rows, step):
            rows = slice(start, start + step)
            x = shard.x[:, rows]
            eta = torch.bmm(x, W).unflatten(2, (self.columns, -1))
            norm = shard.norm[:, rows] if norm_columns is None else shard.block_norms(slice(None), rows, norm_columns)
            yield Chunk(x, norm, shard.y[:, rows, None, None], eta)


@dataclass(frozen=True)
class Multinomial(GLM):
    """Multinomial logistic regression: eta are the log odds of every class against class 0. This is identifiable,
    unlike a softmax over all classes. With two classes it is logistic regression."""

    classes: int

    @property
    def columns(self) -> int:
        return self.classes - 1

    def residual(self, eta: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        classes = torch.arange(1, self.classes, device=eta.device).view(1, 1, -1, 1)
        return self._probabilities(eta) - (y == classes).to(eta)

    def curvature(self, eta: torch.Tensor) -> torch.Tensor:
        p = self._probabilities(eta)
        own = torch.eye(self.columns, device=eta.device, dtype=eta.dtype).unsqueeze(2) * p.unsqueeze(3)
        return own - p.unsqueeze(2) * p.unsqueeze(3)

    def loss(self, eta: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self._scores(eta)
        return scores.logsumexp(2) - self._of_label(scores, y)

    def correct(self, eta: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """A tie for the highest score counts as wrong, as in the softmax head."""
        scores = self._scores(eta)
        label = y.expand(-1, -1, 1, eta.shape[3])
        return self._of_label(scores, y) > scores.scatter(2, label, -torch.inf).amax(2)

    def scores(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Class 0 has score 0."""
        eta = super().scores(x, weights)
        return torch.cat([torch.zeros_like(eta[:, :1]), eta], dim=1)

    def _probabilities(self, eta: torch.Tensor) -> torch.Tensor:
        """Probabilities of all classes except class 0."""
        return eta.sigmoid() if self.columns == 1 else self._scores(eta).softmax(2)[:, :, 1:]

    @staticmethod
    def _scores(eta: torch.Tensor) -> torch.Tensor:
        """Scores of all classes; class 0 has score 0."""
        return torch.cat([torch.zeros_like(eta[:, :, :1]), eta], dim=2)

    @staticmethod
    def _of_label(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return scores.gather(2, y.expand(-1, -1, 1, scores.shape[3])).squeeze(2)


@dataclass(frozen=True)
class Poisson(GLM):
    """Poisson regression: eta is the log of the mean count."""

    @property
    def columns(self) -> int:
        return 1

    def residual(self, eta: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._mean(eta) - y.to(eta)

    def curvature(self, eta: torch.Tensor) -> torch.Tensor:
        return self._mean(eta).unsqueeze(3)

    def loss(self, eta: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Infinite if the mean is: the lane has diverged."""
        counts = y.to(eta)
        return (eta.exp() - counts * eta + torch.lgamma(counts + 1)).squeeze(2)

    @staticmethod
    def _mean(eta: torch.Tensor) -> torch.Tensor:
        return eta.clamp(max=LARGEST_LOG_MEAN).exp()
