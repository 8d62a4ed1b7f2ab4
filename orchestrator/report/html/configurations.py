"""The trials of a search grouped by configuration: by everything except the seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from orchestrator.results.ledger import Ledger, Row
from orchestrator.results.trial_columns import TrialColumns
from orchestrator.results.winners import CellResult
from orchestrator.search.objective import Objective
from trainables.spec import HyperValue

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

    @cached_property
    def mean(self) -> float | None:
        """None unless every seed is done: a mean without the diverged seeds would be too good. To be asked for when all
        trials have been added."""
        scores = [score for score in self.scores if score is not None and math.isfinite(score)]
        return math.fsum(scores) / len(scores) if scores and len(scores) == len(self.scores) else None

    @property
    def std(self) -> float | None:
        """`statistics.stdev` is exact but slow; the page has seven digits."""
        scores, mean = [score for score in self.scores if score is not None], self.mean
        if mean is None or len(scores) < 2:
            return None
        return math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1))


class Groups:
    """The configurations of a cell's search, in the order of their first trials. A trial that belongs to several stages
    counts once."""

    def __init__(self) -> None:
        self._found: dict[str, Configuration] = {}
        self._by_key: dict[str, Configuration] = {}
        self._alike: dict[tuple[int, Any, Any], tuple[Any, Configuration]] = {}
        """By the identity of the hyperparameters, which seeds share, clip and rounds."""

    @property
    def configurations(self) -> list[Configuration]:
        return list(self._found.values())

    def add(self, stage: str, trials: TrialColumns, objective: Objective) -> None:
        scores = trials.accuracy if objective.metric == "accuracy" else trials.loss
        if objective.metric not in ("accuracy", "loss"):
            scores = [row.score(objective.metric) for row in Row.from_columns(trials)]
        columns = zip(trials.key, trials.content, trials.state, scores, trials.seconds, strict=True)
        for key, trial, state, score, seconds in columns:
            here = self._by_key.get(key)
            if here is None:
                here = self._by_key[key] = self._configuration(trial)
                here.states.append(state)
                here.seeds.append(trial["seed"])
                here.scores.append(score if state == "done" else None)
                here.seconds += seconds
                here.keys.append(key)
            if stage not in here.stages:
                here.stages.append(stage)

    def _configuration(self, trial: Mapping[str, Any]) -> Configuration:
        chosen = trial["hyperparameters"]
        alike = id(chosen), trial["privacy"]["clip"], trial["stop_after"] or trial["rounds"]
        if alike not in self._alike:
            values = values_of(trial)
            name = repr(sorted(values.items()))  # as text, because 1 == True
            self._alike[alike] = chosen, self._found.setdefault(name, Configuration(values))
        return self._alike[alike][1]


def grouped(ledger: Ledger, cell: CellResult, stages: Iterable[str]) -> list[Configuration]:
    """The configurations of some stages of a cell's search."""
    groups, whole = Groups(), cell.objective.metric not in ("accuracy", "loss")
    for stage in stages:
        for _, trials in ledger.stage_trials(cell.cell_id, cell.variant.name, stage, whole=whole):
            if trials is not None:
                groups.add(stage, trials, cell.objective)
    return groups.configurations


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


def ranked(configurations: Iterable[Configuration], objective: Objective) -> list[int]:
    """Their indices, best mean first; those without a mean last."""
    costs = [math.inf if c.mean is None else objective.cost(c.mean) for c in configurations]
    return sorted(range(len(costs)), key=costs.__getitem__)
