"""Models, many lanes at a time. What a model must be able to do, and which there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trainables import plugins
from trainables.errors import UserError, in_range
from trainables.lazy import torch
from trainables.models.glm import Multinomial, Poisson
from trainables.models.mlp import MLPHead
from trainables.models.shard import Diagnostics, Shard
from trainables.models.softmax import SoftmaxHead

FORMS = ("softmax", "mlp:HIDDEN", "logistic", "multinomial", "poisson")


HEADS: dict[str, Callable[[str, int, int], Model]] = {}
"""Plug-ins' heads by the word before the colon: made from what stands behind it, the features and the classes."""


class Model(Protocol):
    @property
    def dimension(self) -> int:
        """d: how many weights a lane has."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """The sizes of the layers, one after the other in the weights."""

    @property
    def width(self) -> int:
        """Numbers in work for every row and lane."""

    def initial(self, seed: int) -> torch.Tensor:
        """The weights before the first round, addressed by the seed."""

    def clipped_gradient_sum(
        self,
        shard: Shard,
        theta: torch.Tensor,
        clip: torch.Tensor,
        *,
        diagnose: bool = False,
        automatic: bool = False,
    ) -> tuple[torch.Tensor, Diagnostics | None]:
        """For every client and lane, the sum over the rows of per-example gradients clipped to l2 norm `clip`, plainly
        or automatically (see `clipping`).

        `theta` is (lanes, d), the same for all clients, or (clients, lanes, d); the sum is (clients, lanes, d), in
        double precision.
        """

    def scores(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the model says of rows (rows, features and the constant), by weights (d,): a score for every class, the
        higher the likelier, or of counts the logarithm of their mean."""

    def evaluate(self, shard: Shard, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mean loss per lane, and whether each row is classified correctly: (lanes,), (lanes, rows); None where labels
        are no classes."""


def parse(text: str, *, features: int, classes: int) -> Model:
    """`softmax`, the linear head, `mlp:HIDDEN`, a head with one hidden layer, or a generalised linear model."""
    kind, _, parameter = text.partition(":")
    if kind == "softmax" and not parameter:
        return SoftmaxHead(features, classes)
    if kind == "mlp" and parameter.isdecimal():
        in_range(1, 100_000, **{f"model = {text!r}: HIDDEN": int(parameter)})
        return MLPHead(features, int(parameter), classes)
    if text == "logistic" and classes != 2:
        raise UserError(f"model = 'logistic' is for two classes, the data has {classes}; multinomial is for more")
    if text in ("logistic", "multinomial"):
        return Multinomial(features, classes)
    if text == "poisson":
        return Poisson(features)
    if kind not in HEADS:
        plugins.load_all()
    if kind in HEADS:
        return HEADS[kind](parameter, features, classes)
    raise UserError(f"model = {text!r} is unknown; choose one of: {', '.join([*FORMS, *HEADS])}")
