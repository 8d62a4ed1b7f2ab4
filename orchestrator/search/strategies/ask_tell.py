"""A strategy from a searcher with `ask` and `tell`.

A searcher has a state, and a strategy must answer from recorded results alone. The searcher is therefore replayed: it
is asked for the recorded batches again and told their results in the order of its own proposals. The same results give
the same proposals, in whatever order they arrived, and a resumed search continues exactly.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from pydantic import Field

from orchestrator.search.history import History
from orchestrator.search.plugin_checks import place
from orchestrator.search.strategies.base import Proposal, Strategy
from orchestrator.search.task import SearchTask
from orchestrator.section import Section
from search_spaces import Configuration
from trainables.errors import UserError


class Result(NamedTuple):
    """A configuration that was proposed, with its result."""

    configuration: Configuration
    """As `ask` returned it."""
    cost: float | None
    """Mean of the objective over the search seeds, negated where larger is better; smaller is better. None if a trial
    failed or diverged."""


class Searcher(Protocol):
    """Proposes configurations for one cell. It must be deterministic: random numbers come from a fixed seed."""

    def ask(self, count: int) -> Sequence[Configuration]:
        """The next batch: at most `count` configurations; an empty batch ends the search."""

    def tell(self, results: Sequence[Result]) -> None:
        """The results of the last batch, in the order of its configurations."""


class BatchSettings(Section):
    """The settings of a searcher that is asked for batches."""

    batch: int = Field(default=16, ge=1)
    """Configurations per batch."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of the sampler."""


class AskTellStrategy(Strategy):
    """Subclasses define `name` and `searcher`. The search tries `task.budget` configurations in batches."""

    Settings = BatchSettings
    extends_stages = True

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "name" in vars(cls) and "stages" not in vars(cls):
            cls.stages = (cls.name,)
        if not issubclass(cls.Settings, BatchSettings):
            raise TypeError(f"strategy {cls.__name__}: `Settings` is not a subclass of BatchSettings")

    @abstractmethod
    def searcher(self, task: SearchTask) -> Searcher:
        """A new searcher that has been told nothing."""

    def batch(self, task: SearchTask) -> int:
        return BatchSettings.of(task.settings).batch

    def propose(self, task: SearchTask, history: History) -> Proposal | None:
        stage, settings = self.stages[0], BatchSettings.of(task.settings)
        candidates = history.candidates(stage, unique=False)
        costs = [None if (rank := history.rank(candidate)).failed else rank.cost for candidate in candidates]
        replay: _Replay | None = history.memo.get(stage)
        if replay is None or len(replay.asked) > len(candidates):
            replay = history.memo[stage] = _Replay(self.searcher(task))
        while True:  # once; when replaying, once per recorded batch and once for the new one
            replay.tell(costs)
            size = min(settings.batch, task.budget - len(replay.asked))
            batch = replay.ask(size) if size > 0 else []
            if len(batch) > size > 0:
                asked = f"`ask({size})` returned {len(batch)} configurations"
                raise UserError(f"{place(type(self))}: strategy {self.name}: {asked}")
            if not batch:
                return None
            if len(replay.asked) > len(candidates):
                return Proposal(stage, batch)

    def expected(self, task: SearchTask) -> dict[str, int]:
        return {self.stages[0]: task.budget}


class _Replay:
    """A searcher with all configurations that it has proposed, in order."""

    def __init__(self, searcher: Searcher) -> None:
        self._searcher = searcher
        self._told = 0
        self.asked: list[Configuration] = []

    def ask(self, count: int) -> list[Configuration]:
        batch = list(self._searcher.ask(count))
        self.asked += batch
        return batch

    def tell(self, costs: Sequence[float | None]) -> None:
        """Tell the searcher the results that are new to it. `costs`: those of all configurations of the search so
        far."""
        new = list(zip(self.asked, costs, strict=False))[self._told :]
        if new:
            self._searcher.tell([Result(*pair) for pair in new])
            self._told += len(new)
