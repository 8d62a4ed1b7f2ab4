"""Calls `c/softmax.c`: the softmax head in C.

`q` is the number of inputs: the features and the constant. `d` = q * classes is the number of weights of a lane.
"""

from __future__ import annotations

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
from trainables.models.kernels import GROUP, LANES, TILE
from trainables.models.shard import Diagnostics, Shard


def _layout_weights(theta: torch.Tensor, q: int, classes: int) -> list[tuple[Layout, torch.Tensor]]:
    """Weights for logits in base 2, in the layouts that C expects."""
    scaled = (theta if theta.dim() == 3 else theta.unsqueeze(0)) * LOG2E
    return [(layout, layout.weights(scaled[:, layout.lanes], q)) for layout in layouts(scaled.shape[1], classes)]


_cached_layouts = LastCall(_layout_weights)


def clipped_gradient_sum(
    shard: Shard, theta: torch.Tensor, clip: torch.Tensor, q: int, classes: int, diagnose: bool, automatic: bool = False
) -> tuple[torch.Tensor, Diagnostics | None]:
    """`theta` is (lanes, d), or (clients, lanes, d). The sum is (clients, lanes, d)."""
    check_gradient_inputs(shard, theta, clip, q, classes)
    parts: list[Part] = []
    for layout, weights in _cached_layouts.of(theta, q, classes):
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
    """Per lane: the sum of the losses, in base 2, and which rows are classified correctly."""
    check_evaluation(shard, theta, q, classes)
    losses, correct = [], []
    for layout, weights in _layout_weights(theta, q, classes):
        scratch = _scratch(layout)
        loss = torch.empty(len(weights), layout.block_lanes, dtype=torch.float64)
        right = torch.empty(*loss.shape, shard.rows, dtype=torch.bool)
        library().evaluation(
            *(pointer(shard.x), pointer(shard.y), shard.rows, q, classes, pointer(weights), len(weights), layout.wide),
            *(pointer(loss), pointer(right), pointer(scratch)),
        )
        losses.append(loss.flatten()[: layout.count])
        correct.append(right.flatten(0, 1)[: layout.count])
    return torch.cat(losses), torch.cat(correct)


def _scratch(layout: Layout) -> torch.Tensor:
    """Memory for the intermediate results of some tiles."""
    return torch.empty(GROUP * TILE * layout.columns + layout.outputs * LANES)
