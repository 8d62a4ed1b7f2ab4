"""The softmax head in C: what `softmax.c` is given, and what it gives back."""

from __future__ import annotations

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


def _laid_out(theta: torch.Tensor, q: int, classes: int) -> list[tuple[Layout, torch.Tensor]]:
    """Weights for logits to base 2, as C wants them."""
    scaled = (theta if theta.dim() == 3 else theta.unsqueeze(0)) * LOG2E
    return [(layout, layout.weights(scaled[:, layout.lanes], q)) for layout in layouts(scaled.shape[1], classes)]


_OF_ALL_CLIENTS = Remembered(_laid_out)


def clipped_gradient_sum(
    shard: Shard, theta: torch.Tensor, clip: torch.Tensor, q: int, classes: int, diagnose: bool, automatic: bool = False
) -> tuple[torch.Tensor, Diagnostics | None]:
    """`theta` is (lanes, d), or (clients, lanes, d). The sum is (clients, lanes, d)."""
    check_all(shard, theta, clip, q, classes)
    parts: list[Part] = []
    for layout, weights in _OF_ALL_CLIENTS.of(theta, q, classes):
        clips, scratch = layout.clips(clip), _scratch(layout)
        total = torch.zeros(len(weights), shard.clients, q, layout.columns, dtype=torch.float64)
        seen = layout.seen(len(weights), shard.clients) if diagnose else None
        library().gradient_sums(
            *(place(part) for part in (shard.x, shard.norm, shard.y, shard.real_rows)),
            *(shard.clients, shard.rows, q, classes),
            *(place(weights), per_client(theta), len(weights), layout.wide, place(clips), automatic),
            *(place(total), *places(seen), place(scratch)),
        )
        parts.append(Part(layout.gradient(total), None if seen is None else layout.by_lane(seen)))
    return joined(parts)


def evaluate(shard: Shard, theta: torch.Tensor, q: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses to base 2 per lane, and whether each row is classified correctly."""
    check_evaluation(shard, theta, q, classes)
    losses, rights = [], []
    for layout, weights in _laid_out(theta, q, classes):
        scratch = _scratch(layout)
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
