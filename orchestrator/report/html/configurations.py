"""The trials of a search grouped by configuration: by everything except the seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from orchestrator.results.ledger import Ledger, Row
from orchestrator.search.objective import Objective
from trainables.spec import HyperValue

CHUNK = 1000  # rows in memory at a time
WORST_FIRST = ("failed", "diverged", "done")


@dataclass
class Configuration:
    """One configuration with the outcome of each of its seeds."""

    values: dict[str, HyperValue]
    stages: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)
    seconds: float = 0.0
    keys: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """The worst state of any of its seeds."""
        return min(self.states, key=WORST_FIRST.index)

    @property
    def mean(self) -> float | None:
        """None unless every seed is done: a mean without the diverged seeds would be too good."""
        scores = [score for score in self.scores if score is not None and math.isfinite(score)]
        return fmean(scores) if scores and len(scores) == len(self.scores) else None

    @property
    def std(self) -> float | None:
        scores = [score for score in self.scores if score is not None]
        return stdev(scores) if self.mean is not None and len(scores) > 1 else None


def grouped(ledger: Ledger, stages: Mapping[str, Sequence[str]], objective: Objective) -> list[Configuration]:
    """The configurations of a cell's search, in the order of their first trials. A trial that belongs to several stages
    counts once."""
    configurations: dict[str, Configuration] = {}
    by_key: dict[str, Configuration] = {}
    for stage, keys in stages.items():
        for row in _rows(ledger, [key for key in keys if key not in by_key], objective):
            trial = row.content
            values = values_of(trial)
            here = configurations.setdefault(json.dumps(values, sort_keys=True), Configuration(values))
            here.states.append(row.state)
            here.seeds.append(trial["seed"])
            here.scores.append(row.score(objective.metric) if row.state == "done" else None)
            here.seconds += row.seconds
            here.keys.append(row.key)
            by_key[row.key] = here
        for key in keys:
            if key in by_key and stage not in by_key[key].stages:
                by_key[key].stages.append(stage)
    return list(configurations.values())


def values_of(trial: Mapping[str, Any]) -> dict[str, HyperValue]:
    """Everything that a search may vary: hyperparameters, the clip, and the number of rounds actually run."""
    rounds = trial["stop_after"] or trial["rounds"]
    return {**trial["hyperparameters"], "clip": trial["privacy"]["clip"], "rounds": rounds}


def varied(configurations: Sequence[Configuration]) -> list[str]:
    """The hyperparameters with more than one value."""
    values: dict[str, set[HyperValue]] = {}
    for configuration in configurations:
        for name, value in configuration.values.items():
            values.setdefault(name, set()).add(value)
    return [name for name, tried in values.items() if len(tried) > 1]


def _rows(ledger: Ledger, keys: Sequence[str], objective: Objective) -> Iterator[Row]:
    whole = objective.metric not in ("accuracy", "loss")  # these have their own columns
    for start in range(0, len(keys), CHUNK):
        yield from ledger.rows(keys[start : start + CHUNK], whole=whole).values()


def ranked(configurations: Iterable[Configuration], objective: Objective) -> list[int]:
    """Their indices, best mean first; those without a mean last."""
    costs = [math.inf if c.mean is None else objective.cost(c.mean) for c in configurations]
    return sorted(range(len(costs)), key=costs.__getitem__)
