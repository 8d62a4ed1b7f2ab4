"""Checks the values of a checkpoint before a pack continues from it: a wrong round would repeat or omit releases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from trainables.federation.lane_result import LaneResult
from trainables.federation.pack import ClientWork

STATES = ("running", "done", "diverged", "failed")


def check_round(t: Any, last_round: int) -> None:
    if type(t) is not int or not 0 <= t <= last_round:
        raise ValueError(f"round {t!r} is not in [0, {last_round}]")


def check_weights(saved: dict[str, Any], work: ClientWork, weights: torch.Tensor) -> None:
    """`work`, `weights`: of the new pack before its first round."""
    lanes = len(saved["lanes"])
    if sum(saved["groups"]) != lanes or any(type(size) is not int or size < 1 for size in saved["groups"]):
        raise ValueError("the groups are not those of its lanes")
    started, anything = saved["t"] > 0, None
    _check(saved, "theta", (lanes, weights.shape[1]), weights.dtype)
    _check(saved, "centre", (lanes, anything) if started and work.preprocesses else None)
    _check(saved, "length", (lanes,) if started and work.scales else None)
    if saved["length"] is not None and not (torch.isfinite(saved["length"]) & (saved["length"] > 0)).all():
        raise ValueError("a length is not a positive number")
    if saved["clients"] is not None and saved["clients"]["t"] != saved["t"]:
        raise ValueError("the states of its clients are those of another round")
    if len(saved["states"]) != len(saved["groups"]):
        raise ValueError("the states are not those of its groups")
    for size, state in zip(saved["groups"], saved["states"], strict=True):
        if not all(isinstance(value, torch.Tensor) and value.shape[:1] == (size,) for value in state.values()):
            raise ValueError("the states are not those of its lanes")


def _check(
    saved: dict[str, Any], name: str, shape: tuple[int | None, ...] | None, dtype: torch.dtype = torch.float32
) -> None:
    """`shape`: the expected shape, with None for a dimension of any size; None if there must be no tensor."""
    value = saved[name]
    if shape is None:
        if value is not None:
            raise ValueError(f"it has a {name}, and its trials have none")
        return
    fits = isinstance(value, torch.Tensor) and value.dtype == dtype and value.dim() == len(shape)
    if not fits or any(size not in (found, None) for found, size in zip(value.shape, shape, strict=True)):
        raise ValueError(f"{name} is not a {dtype} tensor of the shape {shape}")


def check_results(results: Sequence[LaneResult], t: int) -> None:
    for lane in results:
        rounds = [number for curve in lane.metrics.values() for number in curve]
        values = [value for curve in lane.metrics.values() for value in curve.values()]
        if lane.state not in STATES or any(type(number) is not int or not 0 <= number <= t for number in rounds):
            raise ValueError(f"the metrics of trial {lane.key} are not those of {t} rounds")
        if type(lane.rounds) is not int or not 0 <= lane.rounds <= t or not all(type(v) is float for v in values):
            raise ValueError(f"the metrics of trial {lane.key} are not those of {t} rounds")
        if type(lane.seconds) is not float or not 0 <= lane.seconds < math.inf:
            raise ValueError(f"trial {lane.key} has taken {lane.seconds!r} seconds")
