"""The head with a hidden layer in C: what `mlp.c` is given, and what it gives back.

The constant beside the hidden units is a unit, too, whose weights are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainables.lazy import torch
from trainables.models.compiled import (
    LOG2E,
    Layout,
    Part,
    Remembered,
    check_all,
    check_evaluation,
    joined,
    layouts,
    library,
    per_client,
    place,
    places,
)
from trainables.models.kernels import LANES, TILE
from trainables.models.shard import Diagnostics, Shard


@dataclass(frozen=True)
class Sizes:
    q: int
    """Features, and the constant beside them."""
    hidden: int
    classes: int

    @property
    def units(self) -> int:
        return self.hidden + 1


@dataclass(frozen=True)
class Weights:
    """Of some lanes, as C wants them."""

    first: torch.Tensor
    second: torch.Tensor
    """For logits to base 2."""
    turned: torch.Tensor | None
    """The second layer's, classes first: for lanes that are computed one by one."""
    units: Layout
    classes: Layout

    @classmethod
    def of(cls, theta: torch.Tensor, size: Sizes, units: Layout, classes: Layout) -> Weights:
        """`theta` is (clients or one, lanes, d)."""
        first, second = theta[:, units.lanes].split((size.q * size.hidden, size.units * size.classes), dim=2)
        whole = torch.nn.functional.pad(first.unflatten(2, (size.q, size.hidden)), (0, 1)).flatten(2)
        second = second * LOG2E
        turned = None
        if not units.wide:
            turned = units.weights(second.unflatten(2, (size.units, size.classes)).mT.flatten(2), size.classes)
        return cls(units.weights(whole, size.q), classes.weights(second, size.units), turned, units, classes)

    @property
    def blocks(self) -> int:
        return len(self.first)

    def scratch(self) -> torch.Tensor:
        across = 2 * self.units.columns + self.classes.columns + 2 * LANES
        return torch.empty(TILE * across + max(self.units.outputs, self.classes.outputs) * LANES)


def _laid_out(theta: torch.Tensor, size: Sizes) -> list[Weights]:
    of_clients, count = theta if theta.dim() == 3 else theta.unsqueeze(0), theta.shape[-2]
    both = zip(layouts(count, size.units), layouts(count, size.classes), strict=True)
    return [Weights.of(of_clients, size, units, classes) for units, classes in both]


_OF_ALL_CLIENTS = Remembered(_laid_out)


def clipped_gradient_sum(
    shard: Shard, theta: torch.Tensor, clip: torch.Tensor, size: Sizes, diagnose: bool, automatic: bool
) -> tuple[torch.Tensor, Diagnostics | None]:
    """`theta` is (lanes, d), or (clients, lanes, d). The sum is (clients, lanes, d)."""
    check_all(shard, theta, clip, size.q, size.classes)
    parts: list[Part] = []
    for weights in _OF_ALL_CLIENTS.of(theta, size):
        units, clips, scratch = weights.units, weights.units.clips(clip), weights.scratch()
        first = torch.zeros(weights.blocks, shard.clients, *weights.first.shape[2:], dtype=torch.float64)
        second = torch.zeros(weights.blocks, shard.clients, *weights.second.shape[2:], dtype=torch.float64)
        seen = units.seen(weights.blocks, shard.clients) if diagnose else None
        library().mlp_gradient_sums(
            *(place(part) for part in (shard.x, shard.norm, shard.y, shard.real_rows)),
            *(shard.clients, shard.rows, size.q, size.units, size.classes),
            *(place(weights.first), place(weights.second), None if weights.turned is None else place(weights.turned)),
            *(per_client(theta), weights.blocks, units.wide, place(clips), automatic),
            *(place(first), place(second), *places(seen), place(scratch)),
        )
        of_units = units.gradient(first).unflatten(2, (size.q, size.units))[..., : size.hidden].flatten(2)
        gradient = torch.cat([of_units, weights.classes.gradient(second)], dim=2)
        parts.append(Part(gradient, None if seen is None else units.by_lane(seen)))
    return joined(parts)


def evaluate(shard: Shard, theta: torch.Tensor, size: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses to base 2 per lane, and whether each row is classified correctly."""
    check_evaluation(shard, theta, size.q, size.classes)
    losses, rights = [], []
    for weights in _laid_out(theta, size):
        units, scratch = weights.units, weights.scratch()
        loss = torch.empty(weights.blocks, units.side_by_side, dtype=torch.float64)
        right = torch.empty(*loss.shape, shard.rows, dtype=torch.bool)
        library().mlp_evaluation(
            *(place(shard.x), place(shard.y), shard.rows, size.q, size.units, size.classes),
            *(place(weights.first), place(weights.second), weights.blocks, units.wide),
            *(place(loss), place(right), place(scratch)),
        )
        losses.append(loss.flatten()[: units.count])
        rights.append(right.flatten(0, 1)[: units.count])
    return torch.cat(losses), torch.cat(rights)
