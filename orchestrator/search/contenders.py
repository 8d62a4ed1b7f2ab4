"""The unit of a search: a configuration with its trials, which differ in their seed alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

from orchestrator.study.objective import ACCURACY, Objective

Outcome = tuple[str, float | None, float | None]
"""State, score (what the study's objective measures), loss: on the validation rows, after the last round."""


@dataclass(frozen=True)
class Contender:
    keys: tuple[str, ...]
    """Of its trials, seed by seed."""

    @property
    def key(self) -> str:
        """Of the first, which stands for the configuration."""
        return self.keys[0]

    def ended(self, outcomes: Mapping[str, Outcome]) -> bool:
        return all(key in outcomes for key in self.keys)

    def standing(self, outcomes: Mapping[str, Outcome], objective: Objective = ACCURACY) -> Standing:
        return Standing.of([outcomes[key] for key in self.keys], objective)

    def scores(self, outcomes: Mapping[str, Outcome]) -> list[float | None]:
        """Seed by seed; None for a trial that did not run to its end."""
        return [score if state == "done" else None for state, score, _ in (outcomes[key] for key in self.keys)]


def contenders_of(keys: Sequence[str], seeds: int) -> list[Contender]:
    """A stage lists its trials configuration by configuration, the seeds of each side by side. Each once, where it
    stands first."""
    starts = range(0, len(keys), seeds) if keys else []  # a stage that a study does not have has no seeds either
    return list(dict.fromkeys(Contender(tuple(keys[start : start + seeds])) for start in starts))


class Standing(NamedTuple):
    """How a contender did. Smaller is better, part by part: one that was lost on a seed comes after all that were not,
    then the mean cost counts, then the mean loss."""

    lost: int
    cost: float
    loss: float

    @classmethod
    def of(cls, ended: Sequence[Outcome], objective: Objective = ACCURACY) -> Standing:
        """By the outcomes of its trials."""
        done = [(score, loss) for state, score, loss in ended if state == "done" and score is not None]
        if not done:
            return cls(len(ended), math.inf, math.inf)
        losses = [math.inf if loss is None else loss for _, loss in done]
        return cls(len(ended) - len(done), objective.cost(mean_score(ended)), mean(losses))


def mean_score(ended: Sequence[Outcome]) -> float:
    """Of those that ran to their end."""
    return mean([score for state, score, _ in ended if state == "done" and score is not None])


def mean(values: Sequence[float]) -> float:
    return values[0] if len(values) == 1 else fmean(values)  # of one value, that value to the last bit


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation; of a single value none is known, and it counts as zero."""
    return stdev(values) if len(values) > 1 else 0.0


def paired(ours: Sequence[float | None], theirs: Sequence[float | None]) -> tuple[float, float] | None:
    """The mean of the differences seed by seed, and its standard error; None where they share no seed."""
    both = [a - b for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    if not both:
        return None
    return mean(both), spread(both) / math.sqrt(len(both))
