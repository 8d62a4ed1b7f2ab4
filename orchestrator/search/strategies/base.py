"""The interface of a search strategy.

A strategy proposes the configurations of one cell, stage by stage. It is asked for the next stage each time all trials
it proposed so far have ended, and answers from their results alone: the same results give the same proposals, in
whatever order they arrived, so an interrupted sweep continues where it stopped. After the search, the best candidates
may meet in a contest, and the winner is confirmed; a strategy does not propose these two stages.

A strategy is a subclass of `Strategy` with a name, in a file of its own in this package or in a plug-in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import ClassVar, NamedTuple

from orchestrator.search.history import History
from orchestrator.search.selection import Choice
from orchestrator.search.task import SearchTask, StageRounds
from orchestrator.section import Section
from search_spaces import Configuration, SearchSpace


class Proposal(NamedTuple):
    """Configurations to run next, as a new stage or as a further part of the last one."""

    stage: str
    """One of the strategy's `stages`."""
    configurations: Sequence[Configuration]
    """At least one."""
    seeds: Sequence[int] | None = None
    """A seed for each configuration, instead of all search seeds; only for strategies with `chooses_seeds` and for the
    strategy `private`."""


class Strategy(ABC):
    """Proposes the configurations of a cell, stage by stage. Subclasses define `name`, `stages`, `propose` and
    `expected`; everything else has a default."""

    name: ClassVar[str]
    """Name in `search.strategies` of a study file."""
    stages: ClassVar[tuple[str, ...]]
    """All stages that it may have, in order. No other strategy may have a stage of the same name."""
    Settings: ClassVar[type[Section]] = Section
    """Its own section of a study file, `search: {NAME: ...}`."""
    extends_stages: ClassVar[bool] = False
    """Whether it may add configurations to a stage after it has seen results of that stage. Failed trials of its stages
    are then not run again when the sweep is resumed."""
    searches_budgets_together: ClassVar[bool] = False
    """Whether it proposes for all budgets of a method in a setting at the same time: it is asked when the trials of all
    these cells have ended, and `history.budgets` holds the results of all of them."""
    chooses_seeds: ClassVar[bool] = False
    """Whether its proposals name one of the search seeds (`task.seeds`) for every configuration."""
    prefers_small_spread: ClassVar[bool] = True
    """Whether, of the configurations of a contest within one standard error of the best mean, the one with the smallest
    spread wins. If not, the best mean wins."""
    samples_ranges: ClassVar[bool] = True
    """Whether values are sampled from ranges, not taken from a grid."""
    publishes_only_winner: ClassVar[bool] = False
    """Whether nothing but the winner may be shown; only for the strategy `private`, whose privacy cost is known."""
    caption: ClassVar[str] = ""
    """A sentence for table captions, if trials differ from the usual ones."""

    @abstractmethod
    def propose(self, task: SearchTask, history: History) -> Proposal | None:
        """The next configurations, or None when the search is over. Every trial in `history` has ended."""

    @abstractmethod
    def expected(self, task: SearchTask) -> dict[str, int]:
        """For each stage, the number of configurations that run if no trial fails, as far as known before the first
        result."""

    def batch(self, task: SearchTask) -> int | None:
        """Configurations that it proposes at a time; None: all of a stage. Estimates need it: a pack has trials that
        run at the same time."""
        return None

    def competing(self, stages: Container[str]) -> tuple[str, ...]:
        """Which of these stages have the candidates that can win."""
        return tuple(stage for stage in self.stages if stage in stages)

    def planned_rounds(self, stage: str, rounds: StageRounds) -> int:
        """Rounds that the privacy budget of a trial of this stage is split over. `rounds`: the study's settings."""
        return rounds.fine

    def last_round(self, stage: str, planned: int, settings: Section) -> int:
        """The round after which a trial of this stage stops, at most `planned`. `settings`: the strategy's section."""
        return planned

    def finalists(self, task: SearchTask, history: History, count: int) -> list[Configuration] | None:
        """The configurations that enter the contest, best first, at most `count`. None: those with the best mean score
        in the search."""
        return None

    def adds_configurations(self, stage: str) -> bool:
        """Whether a stage may have configurations that no earlier stage had."""
        return True

    def restarts(self, stage: str) -> bool:
        """Whether results of a stage replace those of earlier ones, because trials run longer."""
        return False

    def already_run(self, task: SearchTask) -> dict[str, int]:
        """For each stage, how many of its expected configurations an earlier stage has run with the same rounds."""
        return {}

    def fixed_configurations(self, task: SearchTask) -> dict[str, list[Configuration]]:
        """The configurations of stages that do not depend on results, as {stage: [configuration, ...]}."""
        return {}

    def is_exact(self, refine: str) -> bool:
        """Whether exactly the expected trials run if none fails."""
        return False

    def may_add_stages(self, refine: str) -> bool:
        """Whether stages beyond the expected ones may follow."""
        return False

    def check_space(self, space: SearchSpace) -> str:
        """Why this search space cannot be used; empty if it can. In the error message, it follows the method's name."""
        return ""

    def check_settings(self, settings: Section) -> str:
        """Why these settings cannot be used here, such as a missing package; empty if they can. Called before a sweep
        starts, but not when results are read."""
        return ""

    def choose(self, task: SearchTask, history: History) -> Choice | None:
        """The winner, for strategies with `publishes_only_winner`. For others, the study's selection rule applies."""
        raise NotImplementedError
