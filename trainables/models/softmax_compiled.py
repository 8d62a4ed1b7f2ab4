"""The softmax head in C: what `softmax.c` is given, and what it gives back."""

from __future__ import annotations

from trainables.later import torch
from trainables.models.compiled import (
    Layout,
    Part,
    check_all,
    check_evaluation,
    joined,
    layouts,
    library,
    place,
)
from trainables.models.kernels import LANES, TILE
from trainables.models.shard import Diagnostics, Shard


def clipped_gradient_sum(
    shard: Shard, theta: torch.Tensor, clip: torch.Tensor, q: int, classes: int, diagnose: bool, automatic: bool = False
) -> tuple[torch.Tensor, Diagnostics | None]:
    """`theta` is (clients or one, lanes, d), for logits to base 2. The sum is (clients, lanes, d)."""
    check_all(shard, theta, clip, q, classes)
    parts: list[Part] = []
    for layout in layouts(theta.shape[1], classes):
        weights, clips, scratch = layout.weights(theta, q), layout.clips(clip), _scratch(layout)
        total = torch.zeros(len(weights), shard.clients, q, layout.columns, dtype=torch.float64)
        seen = layout.seen(len(weights), shard.clients)
        library().gradient_sums(
            *(place(part) for part in (shard.x, shard.norm, shard.y, shard.real_rows)),
            *(shard.clients, shard.rows, q, classes),
            *(place(weights), theta.shape[0] > 1, len(weights), layout.wide, place(clips), automatic),
            *(place(total), *(place(part) if diagnose else None for part in seen), place(scratch)),
        )
        parts.append((layout.gradient(total), torch.stack([layout.by_lane(part) for part in seen])))
    return joined(parts, diagnose)


def evaluate(shard: Shard, theta: torch.Tensor, q: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses to base 2 per lane, and whether each row is classified correctly."""
    check_evaluation(shard, theta, q, classes)
    losses, rights = [], []
    for layout in layouts(theta.shape[1], classes):
        weights, scratch = layout.weights(theta, q), _scratch(layout)
        loss = torch.empty(len(weights), layout.side_by_side, dtype=torch.float64)
        right = torch.empty(*loss.shape, shard.rows, dtype=torch.bool)
        library().evaluation(
            *(place(shard.x), place(shard.y), shard.rows, q, classes, place(weights), len(weights), layout.wide),
            *(place(loss), place(right), place(scratch)),
        )
        losses.append(loss.flatten()[: layout.count])
        rights.append(right.flatten(0, 1)[: layout.count])
    return torch.cat(losses), torch.cat(rights)


def _scratch(layout: Layout) -> torch.Tensor:
    return torch.empty(TILE * layout.columns + layout.outputs * LANES)
