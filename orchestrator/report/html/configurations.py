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

STATES_WORST_FIRST = ("failed", "diverged", "done")


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
        return min(self.states, key=STATES_WORST_FIRST.index)

    @cached_property
    def mean(self) -> float | None:
        """The mean score; None unless every seed is done, because a mean without diverged seeds would be too good.
        Cached, so read it only after all trials have been added."""
        scores = [score for score in self.scores if score is not None and math.isfinite(score)]
        return math.fsum(scores) / len(scores) if scores and len(scores) == len(self.scores) else None

    @property
    def std(self) -> float | None:
        """The sample standard deviation of the scores. `statistics.stdev` is more precise than needed, and slow."""
        scores, mean = [score for score in self.scores if score is not None], self.mean
        if mean is None or len(scores) < 2:
            return None
        return math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1))


class Groups:
    """The configurations of a cell's search, in the order of their first trials. A trial that belongs to several stages
    counts once."""

    def __init__(self) -> None:
        self._by_values: dict[str, Configuration] = {}
        self._by_trial: dict[str, Configuration] = {}
        self._by_identity: dict[tuple[int, Any, Any], tuple[Any, Configuration]] = {}
        """A cache by id of the hyperparameters (trials of different seeds share the object), clip and rounds. The
        hyperparameters are kept, so that their id stays unique."""

    @property
    def configurations(self) -> list[Configuration]:
        return list(self._by_values.values())

    def add(self, stage: str, trials: TrialColumns, objective: Objective) -> None:
        scores = trials.accuracy if objective.metric == "accuracy" else trials.loss
        if objective.metric not in ("accuracy", "loss"):
            scores = [row.score(objective.metric) for row in Row.from_columns(trials)]
        columns = zip(trials.key, trials.content, trials.state, scores, trials.seconds, strict=True)
        for key, trial, state, score, seconds in columns:
            found = self._by_trial.get(key)
            if found is None:
                found = self._by_trial[key] = self._configuration(trial)
                found.states.append(state)
                found.seeds.append(trial["seed"])
                found.scores.append(score if state == "done" else None)
                found.seconds += seconds
                found.keys.append(key)
            if stage not in found.stages:
                found.stages.append(stage)

    def _configuration(self, trial: Mapping[str, Any]) -> Configuration:
        hyperparameters = trial["hyperparameters"]
        identity = id(hyperparameters), trial["privacy"]["clip"], trial["stop_after"] or trial["rounds"]
        if identity not in self._by_identity:
            values = values_of(trial)
            text = repr(sorted(values.items()))  # as text, because 1 == True
            self._by_identity[identity] = hyperparameters, self._by_values.setdefault(text, Configuration(values))
        return self._by_identity[identity][1]


def grouped(ledger: Ledger, cell: CellResult, stages: Iterable[str]) -> list[Configuration]:
    """The configurations of some stages of a cell's search."""
    groups, whole = Groups(), cell.objective.metric not in ("accuracy", "loss")
    for stage in stages:
        for _, trials in ledger.stage_trials(cell.cell_id, cell.variant.name, stage, whole=whole):
            if trials is not None:
                groups.add(stage, trials, cell.objective)
    return groups.configurations


def values_of(trial: Mapping[str, Any]) -> dict[str, HyperValue]:
    """Everything that a search can vary: hyperparameters, the clip, and the number of rounds to run, which is
    smaller in stages that stop trials early."""
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
    """The indices of the configurations, best mean first; those without a mean last."""
    costs = [math.inf if c.mean is None else objective.cost(c.mean) for c in configurations]
    return sorted(range(len(costs)), key=costs.__getitem__)
