"""One model of the score for all budgets of a method: a Gaussian process over hyperparameters and noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from orchestrator.search.history import History
from orchestrator.search.strategies.base import Proposal, Strategy
from orchestrator.search.task import SearchTask
from orchestrator.section import Section
from search_spaces import Configuration

if TYPE_CHECKING:
    from orchestrator.search.surface.batches import Candidates
    from orchestrator.search.surface.lattice import Beyond, Lattice
    from orchestrator.search.surface.model import Surface

TRIALS_PER_AXIS, LEAST_TRIALS_PER_AXIS = 16, 64
"""Trials per axis and budget, and the least number over all budgets: the model learns from neighbouring budgets, and
with few budgets there are few neighbours."""
BATCH, LEAST_BATCH = 4, 16
"""Trials per batch and budget, and the least number over all budgets: small packs cost more per trial."""


class SurfaceSettings(Section):
    """A model of the score over all budgets, which proposes batches of trials for all of them."""

    batch: int | None = Field(default=None, ge=1)
    """Trials per batch and budget. Default: 4, or 16 divided by the number of budgets if that is more."""
    values: int | None = Field(default=None, ge=1, le=1000)
    """Least number of values of a numeric axis. Default: 33 for one axis, fewer for more axes. Hyperparameters that all
    trials of a pack share have only the values of the grids."""
    extend: bool = True
    """Continue a numeric axis beyond its ends while the best configuration of a budget lies there."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of the first trials, which fill the space evenly."""


class SurfaceSearch(Strategy):
    """Trials run with one seed each. The first ones fill the space evenly. A model is fitted to the trials of
    all budgets and chooses every further batch, and the configurations that meet in the contest."""

    name = "surface"
    stages = ("surface",)
    Settings = SurfaceSettings
    extends_stages = True
    searches_budgets_together = True
    chooses_seeds = True
    prefers_small_spread = False  # finalists have similar scores: choosing the best mean loses less accuracy
    caption = (
        "The strategy surface runs each configuration of the search with one of the search seeds, and its model "
        "chooses the configurations of the contest."
    )

    def propose(self, task: SearchTask, history: History) -> Proposal | None:
        budgets = list(history.budgets) or [history]
        counts = tuple(len(each.stages.get("surface", [])) for each in budgets)
        batches = history.memo.setdefault("surface batches", {})
        if counts not in batches:
            batches[counts] = _Search(budgets).batch()
        own = next(number for number, each in enumerate(budgets) if each is history)
        proposal: Proposal | None = batches[counts][own]
        return proposal

    def expected(self, task: SearchTask) -> dict[str, int]:
        from orchestrator.search.surface.lattice import Lattice

        lattice = Lattice(task.space, SurfaceSettings.of(task.settings).values, packs_save_time=task.packs_save_time)
        return {"surface": min(trials_of(task), lattice.size * max(1, len(task.seeds)))}

    def batch(self, task: SearchTask) -> int:
        return _batch(task)

    def finalists(self, task: SearchTask, history: History, count: int) -> list[Configuration]:
        from orchestrator.search.surface.batches import finalists

        budgets = list(history.budgets) or [history]
        own = next(number for number, each in enumerate(budgets) if each is history)
        search = _Search(budgets)
        if not _finished(history):
            return []
        lattice = search.tried_lattice()
        return [lattice.configurations[i] for i in finalists(search.candidates(own, lattice), count)]


def trials_of(task: SearchTask) -> int:
    """Number of trials of a cell's search: `search.trials`, or `TRIALS_PER_AXIS` per axis with several values, but at
    least `LEAST_TRIALS_PER_AXIS` over all budgets. There are fewer if all configurations have run with all seeds."""
    per_axis = _per_budget(task, TRIALS_PER_AXIS, LEAST_TRIALS_PER_AXIS)
    axes = sum(len({*axis, *task.space.fine[name]}) > 1 for name, axis in task.space.coarse.items())
    return task.trials or per_axis * max(1, axes)


def _batch(task: SearchTask) -> int:
    """Trials of a budget per batch."""
    return SurfaceSettings.of(task.settings).batch or _per_budget(task, BATCH, LEAST_BATCH)


def _per_budget(task: SearchTask, number: int, least_total: int) -> int:
    """`number`, or more if all budgets together would have fewer than `least_total`."""
    return max(number, math.ceil(least_total / task.budgets))


def _finished(history: History) -> bool:
    """Whether a trial of this budget finished."""
    return history.best("surface") is not None


class _Search:
    """The search of all budgets of a method, when all trials proposed so far have ended."""

    def __init__(self, budgets: Sequence[History]) -> None:
        self.budgets = budgets
        self.task = budgets[0].task
        self.settings = SurfaceSettings.of(self.task.settings)
        memo: dict[str, Any] = budgets[0].memo
        self._lattices: dict[tuple[Any, ...], Lattice] = memo.setdefault("surface lattices", {})
        self.lattice = self._lattice({})
        self._candidates: dict[tuple[int, Lattice], Candidates] = {}

    def _lattice(self, beyond: Beyond) -> Lattice:
        """The lattice whose axes continue by these steps; built once."""
        from orchestrator.search.surface.lattice import Lattice

        key = tuple(sorted(beyond.items()))
        if key not in self._lattices:
            space, values = self.task.space, self.settings.values
            self._lattices[key] = Lattice(space, values, beyond, packs_save_time=self.task.packs_save_time)
        return self._lattices[key]

    def tried_lattice(self) -> Lattice:
        """The lattice whose axes continue beyond their ends as far as trials have been proposed."""
        tried = [each.configuration(c) for each in self.budgets for c in each.candidates("surface")]
        return self._lattice(self.lattice.steps_beyond(tried))

    def _next_lattice(self) -> Lattice:
        """`tried_lattice`; if the setting `extend` is true, continued by one more step where the best configuration of
        a budget lies at an end."""
        from orchestrator.search.surface.batches import best

        tried = self.tried_lattice()
        if not self.settings.extend:
            return tried
        numbers = [number for number, each in enumerate(self.budgets) if _finished(each)]
        leading = [best(self.candidates(number, tried), 1)[0] for number in numbers]
        return self._lattice(tried.with_next_steps([tried.configurations[i] for i in leading]))

    def batch(self) -> list[Proposal | None]:
        """The next proposal for every budget: None for a budget without an available configuration, and None for all
        budgets when the search is over."""
        total = trials_of(self.task)
        tried = max(len(each.stages.get("surface", [])) for each in self.budgets)
        if tried >= total:
            return [None] * len(self.budgets)
        if tried and not any(_finished(each) for each in self.budgets):
            return [None] * len(self.budgets)
        if not tried:
            return self._design(min(total, self._first_trials(total)))
        return self._chosen(min(_batch(self.task), total - tried))

    def _first_trials(self, total: int) -> int:
        """The number of first trials of each budget: larger for few budgets, because the model learns from all."""
        return max(4, min(total // 3, max(8, 48 // len(self.budgets))))

    def _design(self, count: int) -> list[Proposal | None]:
        """The first proposals. One design for all budgets together fills the space evenly, and its configurations are
        dealt to the budgets in turn."""
        design = self.lattice.design(count * len(self.budgets), self.settings.seed)
        return [self._proposal(number, design[number :: len(self.budgets)]) for number in range(len(self.budgets))]

    def _chosen(self, count: int) -> list[Proposal | None]:
        """Proposals of up to `count` trials for every budget, chosen by the model."""
        from orchestrator.search.surface.batches import next_batch

        lattice = self._next_lattice()
        candidates = [self.candidates(number, lattice) for number in range(len(self.budgets))]
        if not any(own.available.any() for own in candidates):
            return [None] * len(self.budgets)
        batch = next_batch(candidates, count)
        return [
            self._proposal(number, [lattice.configurations[i] for owner, i in batch if owner == number])
            for number in range(len(self.budgets))
        ]

    def _proposal(self, number: int, configurations: Sequence[Configuration]) -> Proposal | None:
        """A proposal for budget `number`. The seeds take turns, but a configuration that has run gets an unused seed;
        if there is none, it is left out."""
        seeds, used = self.task.seeds, self._used_seeds(number)
        kept, chosen = [], []
        start = number + len(self.budgets[number].stages.get("surface", []))
        for position, configuration in enumerate(configurations, start):
            own = used.setdefault(self.lattice.identity(configuration), [])
            turns = [seeds[(position + k) % len(seeds)] for k in range(len(seeds))]
            if unused := [seed for seed in turns if seed not in own]:
                kept.append(configuration)
                chosen.append(unused[0])
                own.append(unused[0])
        return Proposal("surface", kept, chosen) if kept else None

    def _used_seeds(self, number: int) -> dict[tuple[object, ...], list[int]]:
        """The seeds that each configuration of budget `number` has run with, by `Lattice.identity`."""
        history = self.budgets[number]
        used: dict[tuple[object, ...], list[int]] = {}
        for candidate in history.candidates("surface"):
            own = used.setdefault(self.lattice.identity(history.configuration(candidate)), [])
            own.append(history.trial_seeds[candidate.key])
        return used

    def candidates(self, number: int, lattice: Lattice) -> Candidates:
        """All configurations of the lattice, at budget `number`. Those that ran with all seeds are not available."""
        import numpy as np

        from orchestrator.search.surface.batches import Candidates
        from orchestrator.search.surface.model import log_noise

        key = number, lattice
        if key not in self._candidates:
            task = self.budgets[number].task
            rounds, places = np.unique(lattice.rounds(task.rounds.fine), return_inverse=True)
            noise = np.array([log_noise(task.noise(count)) for count in rounds.tolist()])[places]
            available = np.ones(len(lattice.configurations), dtype=bool)
            for identity, seeds in self._used_seeds(number).items():
                if len(set(seeds)) >= len(task.seeds) and identity in lattice.positions:
                    available[lattice.positions[identity]] = False
            self._candidates[key] = Candidates(self.surface, number, lattice.points, noise, available, lattice.groups)
        return self._candidates[key]

    @property
    def surface(self) -> Surface:
        """The model of all trials so far."""
        from orchestrator.search.surface.observed import fitted

        counts = tuple(len(each.stages.get("surface", [])) for each in self.budgets)
        models = self.budgets[0].memo.setdefault("surface models", {})
        if counts not in models:
            models.clear()
            models[counts] = fitted(self.budgets, self.lattice)
        model: Surface = models[counts]
        return model
