"""Who leads a search as it stands: kept as trials end, because a view looks often and there may be very many trials."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.search.contenders import Outcome, Standing, mean_score
from orchestrator.study.objective import Objective
from orchestrator.study.strategies import RUNGS

ANEW = (*RUNGS, "contest")
"""Stages after which nothing counts that was before: they run more rounds, or fresh seeds."""


@dataclass
class Lead:
    objective: Objective
    score: float | None = None
    """The best mean over seeds, of configurations that were lost on none; in a contest or on a rung, of those that met
    there."""
    _standing: Standing | None = None
    _stage: str = ""
    _half: dict[tuple[str, int], list[Outcome]] = field(default_factory=dict)
    """Of configurations some of whose seeds have ended."""

    def hear(self, stage: str, contender: int, seeds: int, outcome: Outcome) -> None:
        """A trial of a stage has ended; `contender` says of which configuration, which has so many seeds there."""
        if stage == "confirm":
            return
        found = self._half.setdefault((stage, contender), [])
        found.append(outcome)
        if len(found) < seeds:
            return
        del self._half[stage, contender]
        standing = Standing.of(found, self.objective)
        if standing.lost or (self._stage in ANEW and stage not in ANEW):
            return
        anew = stage in ANEW and stage != self._stage
        if anew or self._standing is None or standing < self._standing:
            self._stage, self._standing, self.score = stage, standing, mean_score(found)
