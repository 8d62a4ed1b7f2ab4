"""The trials of one cell's search and their outcomes, from which a strategy decides what to try next.

A sweep fills its histories while it runs; tables, status and the report build them from the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.search import selection
from orchestrator.search.candidates import Candidate, Outcomes, Rank, candidates_of
from orchestrator.search.task import SearchTask
from search_spaces import Configuration


@dataclass
class History:
    """All trials of the search so far and their outcomes."""

    task: SearchTask
    """The search space and settings."""
    seeds_of_stage: Callable[[str], list[int]]
    """The seeds that each configuration of a stage runs with."""
    outcomes: Outcomes
    """Outcomes of all trials that have ended, by key."""
    stages: dict[str, list[str]] = field(default_factory=dict)
    """The keys of the trials of every stage that has started, ordered by configuration, then by seed."""
    configurations: Mapping[str, Configuration] = field(default_factory=dict)
    """The configuration of every candidate, by the key of its first trial."""
    trial_seeds: Mapping[str, int] = field(default_factory=dict)
    """The seeds of trials, by key, if the strategy chooses one seed per configuration."""
    budgets: Sequence[History] = ()
    """For strategies that search budgets together: the histories of all cells with the same method and setting, this
    one included, in the order of the study's budgets."""
    memo: dict[str, Any] = field(default_factory=dict)
    """A cache for the strategy. Store only values that can be computed from the other fields: it may be empty at any
    call. Budgets that are searched together share it."""
    _unique_cache: dict[str, tuple[list[str], int, list[Candidate]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """By stage: the list of trial keys, its length when the entry was made, and the candidates."""

    def configuration(self, candidate: Candidate) -> Configuration:
        """The hyperparameters of a candidate."""
        return self.configurations[candidate.key]

    def candidates(self, *stages: str, unique: bool = True) -> list[Candidate]:
        """The candidates of these stages, in order. `unique`: a candidate that occurs more than once, in one stage or
        several, is listed once."""
        if unique:
            found = [candidate for stage in stages for candidate in self._unique(stage)]
            return found if len(stages) == 1 else list(dict.fromkeys(found))
        return [
            Candidate(tuple(keys[start : start + self._seed_count(stage)]))
            for stage in stages
            for keys in [self.stages.get(stage, [])]
            for start in range(0, len(keys), self._seed_count(stage))
        ]

    def _unique(self, stage: str) -> list[Candidate]:
        """The candidates of a stage, each once; cached until the stage grows."""
        keys = self.stages.get(stage, [])
        cached = self._unique_cache.get(stage)
        if cached is None or cached[0] is not keys or cached[1] != len(keys):
            cached = self._unique_cache[stage] = keys, len(keys), candidates_of(keys, self._seed_count(stage))
        return cached[2]

    def _seed_count(self, stage: str) -> int:
        return len(self.seeds_of_stage(stage)) or 1

    def ended(self, *stages: str) -> list[Candidate]:
        """The candidates of these stages whose trials have all ended."""
        return [candidate for candidate in self.candidates(*stages) if candidate.ended(self.outcomes)]

    def rank(self, candidate: Candidate) -> Rank:
        """The sort key of a candidate: smaller is better."""
        return candidate.rank(self.outcomes, self.task.objective)

    def ranked(self, *stages: str) -> list[Candidate]:
        """The candidates of these stages whose trials have all ended, best first. Candidates without a finished trial
        are left out."""
        return selection.ranked(self.ended(*stages), self.outcomes, self.task.objective)

    def best(self, *stages: str) -> Candidate | None:
        """The first of `ranked`; None if that is empty."""
        return next(iter(self.ranked(*stages)), None)

    def clearly_differ(self, one: Candidate, other: Candidate) -> bool:
        """Whether two candidates differ by more than the noise of their scores."""
        return selection.clearly_differ(one, other, self.outcomes, self.task.validation_rows, self.task.objective)
