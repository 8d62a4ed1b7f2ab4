"""The best score of a search so far, updated with every trial, because progress displays read it often."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from orchestrator.search.candidates import Outcome, Rank, mean_score
from orchestrator.search.objective import Objective


@dataclass
class RunningBest:
    objective: Objective
    restarting_stages: Container[str]
    """Stages whose results replace those of earlier stages, because they use more rounds or fresh seeds."""
    score: float | None = None
    """Best mean over the seeds, among candidates without a failed seed."""
    _rank: Rank | None = None
    _stage: str = ""
    _partial: dict[tuple[str, int], list[Outcome]] = field(default_factory=dict)
    """The outcomes so far of candidates whose trials have not all ended, by stage and number of the candidate."""

    def add(self, stage: str, candidate: int, seeds: int, outcome: Outcome) -> None:
        """Record a trial of candidate number `candidate`, which has `seeds` trials in this stage."""
        if stage == "confirm":
            return
        outcomes = self._partial.setdefault((stage, candidate), [])
        outcomes.append(outcome)
        if len(outcomes) < seeds:
            return
        del self._partial[stage, candidate]
        rank, restarts = Rank.of(outcomes, self.objective), stage in self.restarting_stages
        if rank.failed or (self._stage in self.restarting_stages and not restarts):
            return
        if (restarts and stage != self._stage) or self._rank is None or rank < self._rank:
            self._stage, self._rank, self.score = stage, rank, mean_score(outcomes)
