"""Early stopping of hopeless lanes: successive halving among the trials of one company (a cell's stage)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from trainables.objective import ACCURACY, OBJECTIVES
from trainables.spec import TrialSpec

if TYPE_CHECKING:
    from trainables.lane_result import LaneResult


def companies(members: Sequence[TrialSpec]) -> list[list[TrialSpec]]:
    """What must stay in one pack: the trials of an early-stopping company; any other trial by itself."""
    found: dict[str, list[TrialSpec]] = {}
    for trial in members:
        found.setdefault(trial.stop_rule or trial.key, []).append(trial)
    return list(found.values())


def lanes_to_stop(trials: Sequence[TrialSpec], lanes: Sequence[LaneResult], t: int) -> list[str]:
    """The keys of the lanes that end after round t. Configurations are compared by their means over seeds, and all
    seeds of one end together; one that has lost a seed comes after those that have not. Those of a company that can
    share a pack at all (whose programs are equal: not those with other local steps) always do, so the answer does not
    depend on how trials were packed."""
    by_key = {lane.key: lane for lane in lanes}
    stop: list[str] = []
    for members in companies([trial for trial in trials if trial.stop_rule]):
        _, rounds, keep, _, *metric = members[0].stop_rule.split(":")
        if str(t) not in rounds.split(","):
            continue
        objective = OBJECTIVES[metric[0]] if metric else ACCURACY
        standings: list[tuple[int, float, float]] = []
        running: list[list[str]] = []
        for seeds in _configurations(members):
            alive = [lane for trial in seeds if (lane := by_key[trial.key]).state == "running"]
            if alive:
                costs = [objective.cost(lane.metrics[objective.metric][t]) for lane in alive]
                losses = [lane.metrics["loss"][t] for lane in alive]
                standings.append((len(seeds) - len(alive), fmean(costs), fmean(losses)))
                running.append([lane.key for lane in alive])
        ranked = sorted(range(len(running)), key=lambda index: standings[index])
        stop += [key for index in ranked[max(1, math.ceil(len(ranked) * float(keep))) :] for key in running[index]]
    return stop


def _configurations(members: Sequence[TrialSpec]) -> list[list[TrialSpec]]:
    """Trials that differ in their seed alone."""
    found: dict[tuple[object, ...], list[TrialSpec]] = {}
    for trial in members:
        found.setdefault((*trial.hyperparameters.items(), trial.privacy.clip), []).append(trial)
    return list(found.values())
