"""Calls `c/mlp.c`: the head with one hidden layer in C.

The constant next to the hidden units is treated as a further unit, with zero weights in the first layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainables.lazy import torch
from trainables.models.compiled import (
    LOG2E,
    LastCall,
    Layout,
    Part,
    check_evaluation,
    check_gradient_inputs,
    join_lanes,
    layouts,
    library,
    per_client,
    pointer,
    pointers,
)
from trainables.models.kernels import LANES, TILE
from trainables.models.shard import Diagnostics, Shard


@dataclass(frozen=True)
class Sizes:
    q: int
    """Features and the constant."""
    hidden: int
    classes: int

    @property
    def units(self) -> int:
        """The hidden units and the constant."""
        return self.hidden + 1


@dataclass(frozen=True)
class Weights:
    """Weights of a range of lanes, in the layouts that C expects."""

    first: torch.Tensor
    second: torch.Tensor
    """W2 times log2 e, for logits in base 2."""
    transposed: torch.Tensor | None
    """W2^T, for the narrow layout."""
    units: Layout
    classes: Layout

    @classmethod
    def of(cls, theta: torch.Tensor, size: Sizes, units: Layout, classes: Layout) -> Weights:
        """`theta` is (clients or 1, lanes, d)."""
        first, second = theta[:, units.lanes].split((size.q * size.hidden, size.units * size.classes), dim=2)
        whole = torch.nn.functional.pad(first.unflatten(2, (size.q, size.hidden)), (0, 1)).flatten(2)
        second = second * LOG2E
        transposed = None
        if not units.wide:
            transposed = units.weights(second.unflatten(2, (size.units, size.classes)).mT.flatten(2), size.classes)
        return cls(units.weights(whole, size.q), classes.weights(second, size.units), transposed, units, classes)

    @property
    def blocks(self) -> int:
        return len(self.first)

    def scratch(self) -> torch.Tensor:
        """Memory for the intermediate results of a tile."""
        across = 2 * self.units.columns + self.classes.columns + 2 * LANES
        return torch.empty(TILE * across + max(self.units.outputs, self.classes.outputs) * LANES)


def _layout_weights(theta: torch.Tensor, size: Sizes) -> list[Weights]:
    of_clients, count = theta if theta.dim() == 3 else theta.unsqueeze(0), theta.shape[-2]
    both = zip(layouts(count, size.units), layouts(count, size.classes), strict=True)
    return [Weights.of(of_clients, size, units, classes) for units, classes in both]


_cached_layouts = LastCall(_layout_weights)


def clipped_gradient_sum(
    shard: Shard, theta: torch.Tensor, clip: torch.Tensor, size: Sizes, diagnose: bool, automatic: bool
) -> tuple[torch.Tensor, Diagnostics | None]:
    """`theta` is (lanes, d), or (clients, lanes, d). The sum is (clients, lanes, d)."""
    check_gradient_inputs(shard, theta, clip, size.q, size.classes)
    parts: list[Part] = []
    for weights in _cached_layouts.of(theta, size):
        units, clips, scratch = weights.units, weights.units.clips(clip), weights.scratch()
        norms = units.norm_columns(shard, theta.shape[-2])
        first = torch.zeros(weights.blocks, shard.clients, *weights.first.shape[2:], dtype=torch.float64)
        second = torch.zeros(weights.blocks, shard.clients, *weights.second.shape[2:], dtype=torch.float64)
        diagnostics = units.diagnostics(weights.blocks, shard.clients) if diagnose else None
        library().mlp_gradient_sums(
            *(pointer(part) for part in (shard.x, shard.norm, shard.y, shard.real_rows)),
            *(shard.norm.shape[2], shard.clients, shard.rows, size.q, size.units, size.classes),
            *(
                pointer(weights.first),
                pointer(weights.second),
                None if weights.transposed is None else pointer(weights.transposed),
            ),
            *(per_client(theta), weights.blocks, units.wide, pointer(clips), pointer(norms), automatic),
            *(pointer(first), pointer(second), *pointers(diagnostics), pointer(scratch)),
        )
        of_units = units.gradient(first).unflatten(2, (size.q, size.units))[..., : size.hidden].flatten(2)
        gradient = torch.cat([of_units, weights.classes.gradient(second)], dim=2)
        parts.append(Part(gradient, None if diagnostics is None else units.by_lane(diagnostics)))
    return join_lanes(parts)


def evaluate(shard: Shard, theta: torch.Tensor, size: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses in base 2 per lane, and whether each row is classified correctly."""
    check_evaluation(shard, theta, size.q, size.classes)
    losses, correct = [], []
    for weights in _layout_weights(theta, size):
        units, scratch = weights.units, weights.scratch()
        loss = torch.empty(weights.blocks, units.block_lanes, dtype=torch.float64)
        right = torch.empty(*loss.shape, shard.rows, dtype=torch.bool)
        library().mlp_evaluation(
            *(pointer(shard.x), pointer(shard.y), shard.rows, size.q, size.units, size.classes),
            *(pointer(weights.first), pointer(weights.second), weights.blocks, units.wide),
            *(pointer(loss), pointer(right), pointer(scratch)),
        )
        losses.append(loss.flatten()[: units.count])
        correct.append(right.flatten(0, 1)[: units.count])
    return torch.cat(losses), torch.cat(correct)
