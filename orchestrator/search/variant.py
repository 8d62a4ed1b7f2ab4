"""A strategy together with a selection rule: one way in which a study searches every cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.search.strategies.base import Strategy
from orchestrator.search.task import StageRounds
from orchestrator.section import Section

SECRET = -1
"""Placeholder for a seed that is never shown."""
Select = Literal["contest", "single"]


@dataclass(frozen=True)
class SearchVariant:
    strategy: Strategy
    select: Select
    """contest: candidates are ranked by their mean over the search seeds, and the best run again on fresh seeds.
    single: the best on the first search seed wins."""
    settings: Section
    """The strategy's section of the study file."""
    search_seeds: Sequence[int]
    contest_seeds: Sequence[int]
    confirm_seeds: Sequence[int]

    @property
    def name(self) -> str:
        """Name in the ledger and in tables."""
        return f"{self.strategy.name} single" if self.select == "single" else self.strategy.name

    @property
    def has_contest(self) -> bool:
        return self.select == "contest" and bool(self.contest_seeds) and not self.strategy.publishes_only_winner

    @property
    def stages(self) -> tuple[str, ...]:
        """All stages that the search may have, in order."""
        contest = ("contest",) if self.has_contest else ()
        return (*self.strategy.stages, *contest, "confirm")

    def seeds(self, stage: str) -> list[int]:
        """The seeds that each configuration of a stage runs with. Where the strategy determines the seeds, a list with
        one placeholder: the first search seed in search stages of a strategy with `chooses_seeds`, `SECRET` in all
        stages of a private search."""
        if self.strategy.publishes_only_winner:
            return [SECRET]
        if stage in ("contest", "confirm"):
            return list(self.contest_seeds if stage == "contest" else self.confirm_seeds)
        one = self.select == "single" or self.strategy.chooses_seeds
        return list(self.search_seeds[:1] if one else self.search_seeds)

    def planned_rounds(self, stage: str, rounds: StageRounds) -> int:
        """Rounds that the privacy budget of a trial of this stage is split over."""
        return rounds.confirm if stage in ("contest", "confirm") else self.strategy.planned_rounds(stage, rounds)

    def last_round(self, stage: str, planned: int) -> int:
        """The round after which a trial of this stage stops, at most `planned`."""
        return planned if stage in ("contest", "confirm") else self.strategy.last_round(stage, planned, self.settings)

    def restarts(self, stage: str) -> bool:
        """Whether results of a stage replace those of earlier stages, because it uses more rounds or fresh seeds."""
        return stage == "contest" or (stage != "confirm" and self.strategy.restarts(stage))
