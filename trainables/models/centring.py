"""Gradient sums and evaluations of lanes whose features are centred and scaled (see `centres`).

Lanes are computed together from the raw rows if their model can do so. Otherwise, and for centres that are too long to
move into the constant, the centre is subtracted from the rows, and its lanes are computed separately.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainables.choices import Precision
from trainables.lazy import torch
from trainables.models import Model
from trainables.models.centres import Centres, Sharing, sharing_of
from trainables.models.compiled import LastCall
from trainables.models.network import NetworkModel
from trainables.models.shard import Diagnostics, Shard


def clipped_gradient_sum(
    model: Model, shard: Shard, theta: torch.Tensor, clip: torch.Tensor, *, diagnose: bool = False, **options: Any
) -> tuple[torch.Tensor, Diagnostics | None]:
    """`Model.clipped_gradient_sum` of the centred rows."""
    if shard.centres is None or isinstance(model, NetworkModel):
        return model.clipped_gradient_sum(shard, theta, clip, diagnose=diagnose, **options)
    sharing = sharing_of(model, shard, theta)
    separate = _separate_centres(shard.centres, sharing)
    if not separate:
        return _shared_sum(model, shard, theta, clip, sharing, diagnose, options)
    total = torch.empty(shard.clients, *theta.shape[-2:], dtype=torch.float64, device=theta.device)
    measured = torch.zeros(2, *total.shape[:2], device=theta.device)
    for lanes, rows in _parts(shard, separate):
        some = theta[..., lanes, :], clip[lanes]
        total[:, lanes], seen = _shared_sum(model, rows, *some, sharing, diagnose, options)
        if seen is not None:
            measured[:, :, lanes] = torch.stack([seen.loss, seen.clipped]).to(measured)
    return total, Diagnostics(*measured) if diagnose else None


def evaluate(model: Model, shard: Shard, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`Model.evaluate` of the centred rows."""
    if shard.centres is None or isinstance(model, NetworkModel):
        return model.evaluate(shard, theta)
    sharing = sharing_of(model, shard, theta)
    separate = _separate_centres(shard.centres, sharing)
    if not separate:
        return _shared_evaluation(model, shard, theta, sharing)
    losses = torch.empty(theta.shape[0], dtype=torch.float64, device=theta.device)
    correct = torch.empty(theta.shape[0], shard.rows, dtype=torch.bool, device=theta.device)
    right: torch.Tensor | None = None
    for lanes, rows in _parts(shard, separate):
        loss, right = _shared_evaluation(model, rows, theta[lanes], sharing)
        losses[lanes] = loss.double()
        if right is not None:
            correct[lanes] = right
    return losses, None if right is None else correct


def with_centres(model: Model, shard: Shard, centres: Centres, precision: Precision = "float32") -> Shard:
    """The rows for lanes with these centres. A network subtracts them from the inputs of its head."""
    if isinstance(model, NetworkModel):
        return replace(shard, centres=centres)
    return shard.with_centres(centres, precision)


def feature_sum(model: Model, shard: Shard, bound: float) -> torch.Tensor:
    """For every client, the sum of the vectors that would be centred, each clipped to l2 norm `bound`; in float64."""
    return model.feature_sum(shard, bound) if isinstance(model, NetworkModel) else shard.feature_sum(bound)


def _separate_centres(centres: Centres, sharing: Sharing) -> list[int]:
    """The centres whose lanes are computed separately."""
    if sharing == "kernel":
        return []
    return [centre for centre in centres.lanes if sharing == "no" or centre in centres.far]


def _parts(shard: Shard, separate: list[int]) -> list[tuple[torch.Tensor, Shard]]:
    """Groups of lanes that are computed together, with their rows. A centre in `separate` is subtracted from the rows
    of its lanes. All other lanes share the raw rows."""
    assert shard.centres is not None
    parts = [(shard.centres.lanes[centre], shard.centred(centre)) for centre in separate]
    others = [lanes for centre, lanes in shard.centres.lanes.items() if centre not in separate]
    if others:
        parts.append((torch.cat(others), shard.for_lanes(torch.cat(others))))
    return parts


def _shared_sum(
    model: Model,
    shard: Shard,
    theta: torch.Tensor,
    clip: torch.Tensor,
    sharing: Sharing,
    diagnose: bool,
    options: dict[str, Any],
) -> tuple[torch.Tensor, Diagnostics | None]:
    centres = shard.centres
    if centres is None:
        return model.clipped_gradient_sum(shard, theta, clip, diagnose=diagnose, **options)
    if sharing == "kernel":
        scaled = centres.scaled_weights(theta, model.blocks[0])
        total, seen = model.clipped_gradient_sum(shard, scaled, clip, diagnose=diagnose, **options)
        centres.scale_gradient_(total, model.blocks[0])
        return total, seen
    raw = _cached_raw_weights.of(theta, centres, model.blocks[0])
    total, seen = model.clipped_gradient_sum(shard, raw, clip, diagnose=diagnose, **options)
    centres.centre_gradient_(total, model.blocks[0])
    return total, seen


def _shared_evaluation(
    model: Model, shard: Shard, theta: torch.Tensor, sharing: Sharing
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if shard.centres is None:
        return model.evaluate(shard, theta)
    if sharing == "kernel":
        return model.evaluate(shard, shard.centres.scaled_weights(theta, model.blocks[0]))
    return model.evaluate(shard.without_centres(), shard.centres.for_raw_features(theta, model.blocks[0]))


def _raw_weights(theta: torch.Tensor, centres: Centres, first_layer: int) -> torch.Tensor:
    return centres.for_raw_features(theta, first_layer)


_cached_raw_weights = LastCall(_raw_weights)
