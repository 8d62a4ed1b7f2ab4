"""The trials of one cell's search and their outcomes: what a strategy decides from, and who wins.

The sweep fills it while it runs; tables, status and the report fill it from the ledger. All find the winner here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.search import selection
from orchestrator.search.candidates import Candidate, Outcomes, Rank, candidates_of
from orchestrator.search.selection import Choice
from search_spaces import Configuration, unique

if TYPE_CHECKING:
    from orchestrator.search.strategies.base import SearchTask
    from orchestrator.search.variant import SearchVariant


@dataclass
class History:
    variant: SearchVariant
    task: SearchTask
    outcomes: Outcomes
    """Of all trials that have ended, by key."""
    stages: dict[str, list[str]] = field(default_factory=dict)
    """Keys of the trials of every stage that has been opened, by configuration, then by seed."""
    configurations: Mapping[str, Configuration] = field(default_factory=dict)
    """By the key of a candidate's first trial."""
    trial_seeds: Mapping[str, int] = field(default_factory=dict)
    """Seeds of the trials, by key, where each has its own."""
    memo: dict[str, Any] = field(default_factory=dict)
    """A strategy's cache of what it can derive again from the rest."""

    def configuration(self, candidate: Candidate) -> Configuration:
        return self.configurations[candidate.key]

    def candidates(self, *stages: str, unique: bool = True) -> list[Candidate]:
        """The candidates of these stages, in order; each once."""
        found = [c for stage in stages for c in candidates_of(self.stages.get(stage, []), self._seeds(stage))]
        if unique:
            return list(dict.fromkeys(found))
        return [
            Candidate(tuple(keys[start : start + self._seeds(stage)]))
            for stage in stages
            for keys in [self.stages.get(stage, [])]
            for start in range(0, len(keys), self._seeds(stage))
        ]

    def _seeds(self, stage: str) -> int:
        return len(self.variant.seeds(stage)) or 1

    def ended(self, *stages: str) -> list[Candidate]:
        """The candidates of these stages all of whose trials have ended."""
        return [candidate for candidate in self.candidates(*stages) if candidate.ended(self.outcomes)]

    def rank(self, candidate: Candidate) -> Rank:
        return candidate.rank(self.outcomes, self.task.objective)

    def ranked(self, *stages: str) -> list[Candidate]:
        """The candidates of these stages, best first; without those of which no trial finished."""
        return selection.ranked(self.ended(*stages), self.outcomes, self.task.objective)

    def best(self, *stages: str) -> Candidate | None:
        return next(iter(self.ranked(*stages)), None)

    def clearly_differ(self, ours: Candidate, theirs: Candidate) -> bool:
        """Whether two candidates differ by more than the noise of their scores."""
        return selection.clearly_differ(ours, theirs, self.outcomes, self.task.validation_rows, self.task.objective)

    # ---- who wins

    @property
    def competing(self) -> tuple[str, ...]:
        """The search stages that hold the candidates for the win, among those with results."""
        return self.variant.strategy.competing([stage for stage in self.stages if self.ended(stage)])

    def winner(self) -> Choice | None:
        """By the results so far: of the contest once it has any, else of the search."""
        strategy, objective = self.variant.strategy, self.task.objective
        if strategy.publishes_only_winner:
            return strategy.choose(self.task, self)
        if contest := self.ended("contest"):
            return selection.win_contest(contest, self.outcomes, objective)
        return selection.choose(self.ended(*self.competing), self.outcomes, self.task.validation_rows, objective)

    def winner_of_first_seed(self) -> Choice | None:
        """What the first search seed alone would have chosen."""
        firsts = [c.key for stage in self.competing for c in self.candidates(stage) if c.key in self.outcomes]
        alone = [Candidate((key,)) for key in dict.fromkeys(firsts)]
        return selection.choose(alone, self.outcomes, self.task.validation_rows, self.task.objective)

    def finalists(self, count: int, guests: Sequence[Configuration] = ()) -> list[Configuration]:
        """The configurations that meet in the contest: the best `count` of all search stages. `guests`, the winners of
        neighbouring budgets, take the last places."""
        own = self.best_configurations()[:count]
        if not own:
            return []
        invited = [guest for guest in unique(guests) if guest not in own][: count - 1]
        return [*own[: count - len(invited)], *invited]

    def best_configurations(self) -> list[Configuration]:
        return unique(map(self.configuration, self.ranked(*self.competing)))
