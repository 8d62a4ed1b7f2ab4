"""A candidate is one configuration with its trials, which differ only in their seed. Searches compare candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import NamedTuple

from orchestrator.search.objective import ACCURACY, Objective

ROUNDING = 1e-9  # relative tolerance for a standard error computed with floats; actual rounding errors are far smaller
Outcome = tuple[str, float | None, float | None]
"""State, score (the study's objective) and loss of a trial after its last round: on the test rows for confirm
trials, else on the validation rows."""
Outcomes = Mapping[str, Outcome]
"""The outcomes of trials, by trial key."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration with its trials, one per seed."""

    keys: tuple[str, ...]
    """The keys of its trials, in the order of the seeds."""

    @property
    def key(self) -> str:
        """The key of the first trial, which identifies the configuration."""
        return self.keys[0]

    def ended(self, outcomes: Outcomes) -> bool:
        """Whether all its trials have ended."""
        return all(key in outcomes for key in self.keys)

    def rank(self, outcomes: Outcomes, objective: Objective = ACCURACY) -> Rank:
        """The sort key of the candidate: smaller is better."""
        return Rank.of([outcomes[key] for key in self.keys], objective)

    def scores(self, outcomes: Outcomes) -> list[float | None]:
        """The score for each seed; None for a trial that did not finish."""
        return [score if state == "done" else None for state, score, _ in (outcomes[key] for key in self.keys)]

    def finished_scores(self, outcomes: Outcomes) -> list[float]:
        """The scores of the trials that finished."""
        return [score for score in self.scores(outcomes) if score is not None]


def candidates_of(keys: Sequence[str], seeds: int) -> list[Candidate]:
    """The candidates of a stage, each once. `keys`: the keys of its trials, ordered by configuration, then by seed."""
    starts = range(0, len(keys), seeds) if keys else []
    return list(dict.fromkeys(Candidate(tuple(keys[start : start + seeds])) for start in starts))


class Rank(NamedTuple):
    """The sort key of a candidate: first the fewest failed seeds, then the lowest mean cost, then the lowest loss."""

    failed: int
    """Seeds on which the trial failed or diverged."""
    cost: float
    """Mean cost over the finished trials; infinite if there is none."""
    loss: float
    """Mean validation loss over the finished trials."""

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], objective: Objective = ACCURACY) -> Rank:
        """The sort key of a candidate with these outcomes."""
        done = [(score, loss) for state, score, loss in outcomes if state == "done" and score is not None]
        if not done:
            return cls(len(outcomes), math.inf, math.inf)
        losses = [math.inf if loss is None else loss for _, loss in done]
        return cls(len(outcomes) - len(done), objective.cost(mean_score(outcomes)), mean(losses))


def mean_score(outcomes: Sequence[Outcome]) -> float:
    """The mean score of the trials that finished."""
    return mean([score for state, score, _ in outcomes if state == "done" and score is not None])


def mean(values: Sequence[float]) -> float:
    return values[0] if len(values) == 1 else math.fsum(values) / len(values)  # a single value is returned unchanged


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for a single value."""
    return stdev(values) if len(values) > 1 else 0.0


def paired_difference(ours: Sequence[float | None], theirs: Sequence[float | None]) -> tuple[float, float] | None:
    """Mean of the differences `ours - theirs` by seed, and its standard error; None if no seed finished for both."""
    differences = [a - b for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    if not differences:
        return None
    return mean(differences), spread(differences) / math.sqrt(len(differences))


def within_standard_error(ours: Sequence[float | None], theirs: Sequence[float | None]) -> bool:
    """Whether the absolute value of the mean of `paired_difference` is at most its standard error; False if no seed
    finished for both. `stdev` is exact but slow, so it is used only if rounding could change the answer."""
    differences = [a - b for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    if not differences:
        return False
    middle = mean(differences)
    if len(differences) > 1:
        squares = sum((difference - middle) ** 2 for difference in differences)
        error = math.sqrt(squares / (len(differences) - 1) / len(differences))
        if abs(abs(middle) - error) > ROUNDING * max(map(abs, differences)):  # false for nan and inf
            return abs(middle) <= error
    exact = paired_difference(ours, theirs)
    return exact is not None and abs(exact[0]) <= exact[1]
