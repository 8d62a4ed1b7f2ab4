"""Calls `c/softmax.c`: the softmax head in C."""

from __future__ import annotations

from trainables.lazy import torch
from trainables.models.compiled import (
    LOG2E,
    LastCall,
    Layout,
    Part,
    check_all,
    check_evaluation,
    join_lanes,
    layouts,
    library,
    per_client,
    pointer,
    pointers,
)
from trainables.models.kernels import LANES, TILE
from trainables.models.shard import Diagnostics, Shard


def _layout_weights(theta: torch.Tensor, q: int, classes: int) -> list[tuple[Layout, torch.Tensor]]:
    """Weights for logits in base 2, in the layouts that C expects."""
    scaled = (theta if theta.dim() == 3 else theta.unsqueeze(0)) * LOG2E
    return [(layout, layout.weights(scaled[:, layout.lanes], q)) for layout in layouts(scaled.shape[1], classes)]


_last_layout = LastCall(_layout_weights)


def clipped_gradient_sum(
    shard: Shard, theta: torch.Tensor, clip: torch.Tensor, q: int, classes: int, diagnose: bool, automatic: bool = False
) -> tuple[torch.Tensor, Diagnostics | None]:
    """`theta` is (lanes, d), or (clients, lanes, d). The sum is (clients, lanes, d)."""
    check_all(shard, theta, clip, q, classes)
    parts: list[Part] = []
    for layout, weights in _last_layout.of(theta, q, classes):
        clips, scratch, norms = layout.clips(clip), _scratch(layout), layout.norm_columns(shard, theta.shape[-2])
        total = torch.zeros(len(weights), shard.clients, q, layout.columns, dtype=torch.float64)
        diagnostics = layout.diagnostics(len(weights), shard.clients) if diagnose else None
        library().gradient_sums(
            *(pointer(part) for part in (shard.x, shard.norm, shard.y, shard.real_rows)),
            *(shard.norm.shape[2], shard.clients, shard.rows, q, classes),
            *(pointer(weights), per_client(theta), len(weights), layout.wide),
            *(pointer(clips), pointer(norms), automatic),
            *(pointer(total), *pointers(diagnostics), pointer(scratch)),
        )
        parts.append(Part(layout.gradient(total), None if diagnostics is None else layout.by_lane(diagnostics)))
    return join_lanes(parts)


def evaluate(shard: Shard, theta: torch.Tensor, q: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses in base 2 per lane, and whether each row is classified correctly."""
    check_evaluation(shard, theta, q, classes)
    losses, rights = [], []
    for layout, weights in _layout_weights(theta, q, classes):
        scratch = _scratch(layout)
        loss = torch.empty(len(weights), layout.block_lanes, dtype=torch.float64)
        right = torch.empty(*loss.shape, shard.rows, dtype=torch.bool)
        library().evaluation(
            *(pointer(shard.x), pointer(shard.y), shard.rows, q, classes, pointer(weights), len(weights), layout.wide),
            *(pointer(loss), pointer(right), pointer(scratch)),
        )
        losses.append(loss.flatten()[: layout.count])
        rights.append(right.flatten(0, 1)[: layout.count])
    return torch.cat(losses), torch.cat(rights)


def _scratch(layout: Layout) -> torch.Tensor:
    return torch.empty(TILE * layout.columns + layout.outputs * LANES)
