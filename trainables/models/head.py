"""The base class for models of plug-ins. A subclass defines its weights and the scores of one row; everything else is
derived.

Gradients are taken row by row, in chunks, so time grows with rows x weights. Lanes are computed one at a time.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import ClassVar

from trainables.lazy import torch
from trainables.models.shard import Diagnostics, Shard
from trainables.privacy.noise import SERVER, Address

CELLS = 1 << 22  # rows x weights of a chunk of an evaluation

Weights = Mapping[str, "torch.Tensor"]


class Head(ABC):
    """A model on the features. Subclasses define its weights and the scores of one row."""

    name: ClassVar[str]
    """Name in a study: `model: NAME`, or `model: NAME:PARAMETER`."""
    linear_in_features: ClassVar[bool] = False
    """Whether the first weights are a matrix (features + 1, k) that multiplies the features, and the features are used
    nowhere else. Only such models can use centred features, because a trained model is converted to one for uncentred
    features."""

    def __init__(self, parameter: str, features: int, classes: int) -> None:
        """`parameter`: the text after the colon."""
        self.parameter, self.features, self.classes = parameter, features, classes

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every array of weights, by name. The flat weights of a saved model are in this order."""

    @abstractmethod
    def forward(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        """The scores (classes,) of one row; `x` has the features, followed by a constant 1. Use plain torch operations,
        without branches that depend on values."""

    def loss(self, scores: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """The loss of one row; default: cross-entropy."""
        return torch.nn.functional.cross_entropy(scores, label)

    # ---- derived

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of weights of each array, in the order of `shapes`."""
        return tuple(math.prod(shape) for shape in self.shapes().values())

    @property
    def dimension(self) -> int:
        """Number of weights."""
        return sum(self.blocks)

    @property
    def width(self) -> int:
        """How many numbers a gradient needs per row and lane. Determines the size of chunks."""
        return self.dimension

    def arrays(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split flat weights (d,) into named arrays."""
        parts = torch.split(weights, list(self.blocks))
        return {name: part.view(shape) for part, (name, shape) in zip(parts, self.shapes().items(), strict=True)}

    def initial(self, seed: int) -> torch.Tensor:
        """The initial weights. Default: matrices ~ N(0, s^2), s = 0.5 sqrt(2 / (inputs + outputs)), as in the linear
        head, and vectors of zeros."""
        drawn = torch.from_numpy(Address(seed, SERVER, 0, 0, "initial weights").normal(self.dimension))
        scales = [0.5 * math.sqrt(2 / (s[0] + s[-1])) if len(s) > 1 else 0.0 for s in self.shapes().values()]
        return drawn * torch.repeat_interleave(torch.tensor(scales), torch.tensor(self.blocks))

    def clipped_gradient_sum(
        self,
        shard: Shard,
        theta: torch.Tensor,
        clip: torch.Tensor,
        *,
        diagnose: bool = False,
        automatic: bool = False,
    ) -> tuple[torch.Tensor, Diagnostics | None]:
        """The sum of the clipped gradients of the rows, per client and lane."""
        from trainables.models import per_example  # imports torch

        total, diagnostics = per_example.clipped_gradient_sum(
            lambda weights, x, label: self.loss(self.forward(self.arrays(weights), x), label),
            *(shard, theta, clip),
            automatic=automatic,
        )
        return total, diagnostics if diagnose else None

    def scores(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The scores (rows, classes) of several rows."""
        return torch.func.vmap(self.forward, in_dims=(None, 0))(self.arrays(weights), x)

    def evaluate(self, shard: Shard, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss (lanes,), and whether each row is classified correctly (lanes, rows). A tie for the highest
        score counts as wrong, as in the linear head."""
        step = max(1, CELLS // self.dimension)
        losses = torch.zeros(theta.shape[0], dtype=torch.float64, device=theta.device)
        correct = torch.zeros(theta.shape[0], shard.rows, dtype=torch.bool, device=theta.device)
        for lane, weights in enumerate(theta):
            for start in range(0, shard.rows, step):
                rows = slice(start, start + step)
                scores, labels = self.scores(shard.x[0, rows], weights), shard.y[0, rows]
                losses[lane] += torch.func.vmap(self.loss)(scores, labels).sum(dtype=torch.float64)
                of_label = scores.gather(1, labels.unsqueeze(1))
                correct[lane, rows] = (scores >= of_label).sum(1) == 1
        return (losses / shard.rows).to(theta.dtype), correct


def defined_in(module: ModuleType) -> dict[str, type[Head]]:
    """The models that a plug-in defines, by name."""
    return {
        value.name: value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Head) and value.__module__ == module.__name__
        if not inspect.isabstract(value)
    }
