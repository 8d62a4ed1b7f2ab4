"""Early stopping of hopeless lanes: successive halving among the trials of one company (a cell's stage)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainables.objective import ACCURACY, OBJECTIVES
from trainables.server import LaneResult
from trainables.spec import TrialSpec


def companies(members: Sequence[TrialSpec]) -> list[list[TrialSpec]]:
    """What must stay in one pack: the trials of an early-stopping company; any other trial by itself."""
    found: dict[str, list[TrialSpec]] = {}
    for trial in members:
        found.setdefault(trial.stop_rule or trial.key, []).append(trial)
    return list(found.values())


def lanes_to_stop(trials: Sequence[TrialSpec], lanes: Sequence[LaneResult], t: int) -> list[str]:
    """The keys of the lanes that end after round t. A company always shares one pack, so the answer does not depend
    on how trials were packed."""
    by_key = {lane.key: lane for lane in lanes}
    stop: list[str] = []
    for members in companies([trial for trial in trials if trial.stop_rule]):
        _, rounds, keep, _, *metric = members[0].stop_rule.split(":")
        if str(t) not in rounds.split(","):
            continue
        running = [trial.key for trial in members if by_key[trial.key].state == "running"]
        objective = OBJECTIVES[metric[0]] if metric else ACCURACY
        costs = {
            key: (objective.cost(by_key[key].metrics[objective.metric][t]), by_key[key].metrics["loss"][t])
            for key in running
        }
        ranked = sorted(running, key=lambda key: costs[key])
        stop += ranked[max(1, math.ceil(len(ranked) * float(keep))) :]
    return stop
