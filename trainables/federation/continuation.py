"""Trials that continue where a shorter run of the same trial stopped.

A trial that ends before its last planned round (`stop_after`) leaves its lane's state behind. A later trial that
differs only in `stop_after` starts from this state and gets the result that it would have from round 0, bit for bit.
Its pack may join lanes of several earlier packs.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from trainables.federation.pack import group_key, order_lanes
from trainables.federation.trial_spec import TrialSpec


def joined(paused: Sequence[bytes], trials: Sequence[TrialSpec]) -> bytes:
    """The checkpoint of a new pack of these trials, from the lanes of packs that stopped early."""
    saved: list[dict[str, Any]] = [torch.load(io.BytesIO(content), weights_only=True) for content in paused]
    places = {key: (part, lane) for part, content in enumerate(saved) for lane, key in enumerate(content["lanes"])}
    trials = order_lanes(trials)
    lanes = [places[trial.full_key] for trial in trials]
    (t,) = {saved[part]["t"] for part, _ in lanes}
    groups = [list(members) for _, members in itertools.groupby(trials, key=group_key)]
    clients = None
    if saved[0]["clients"] is not None:
        clients = {
            "lanes": tuple(trial.key for trial in trials),
            "t": t,
            "clients": {
                client: {name: _rows([s["clients"]["clients"][client][name] for s in saved], lanes) for name in state}
                for client, state in saved[0]["clients"]["clients"].items()
            },
        }
    content = {
        "t": t,
        "lanes": [trial.key for trial in trials],
        "groups": [len(members) for members in groups],
        "theta": _rows([s["theta"] for s in saved], lanes),
        "centre": None if saved[0]["centre"] is None else _rows([s["centre"] for s in saved], lanes),
        "length": None if saved[0]["length"] is None else _rows([s["length"] for s in saved], lanes),
        "states": [group_state(saved, [places[trial.full_key] for trial in members]) for members in groups],
        "results": {
            trial.key: _result(trial, saved[part]["results"][trial.full_key])
            for trial, (part, _) in zip(trials, lanes, strict=True)
        },
        "clients": clients,
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _rows(tensors: Sequence[torch.Tensor], lanes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """One row per lane, from the tensors of the packs."""
    return torch.stack([tensors[part][lane] for part, lane in lanes])


def group_state(saved: Sequence[dict[str, Any]], lanes: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """The state of one group of lanes."""
    rows: list[dict[str, torch.Tensor]] = []
    for part, lane in lanes:
        starts = list(itertools.accumulate(saved[part]["groups"], initial=0))
        group = next(number for number in range(len(starts) - 1) if lane < starts[number + 1])
        state = saved[part]["states"][group]
        rows.append({name: value[lane - starts[group]] for name, value in state.items()})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _result(trial: TrialSpec, saved: dict[str, Any]) -> dict[str, Any]:
    """The result so far, without the evaluation after the last round if a longer run does not evaluate there."""
    metrics = {
        name: {t: value for t, value in curve.items() if t % trial.evaluate_every == 0}
        for name, curve in saved["metrics"].items()
    }
    return {**saved, "key": trial.key, "metrics": metrics}
