"""Replays search strategies on dense tables, which hold every configuration at every budget with several seeds.

A strategy proposes configurations; each gets the score of the nearest configuration of the table. The contest runs on
seeds that the search does not use. The regret of the winner is how far its mean over all seeds of the table lies below
the best mean, in points of validation accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.search.candidates import Candidate, Outcome
from orchestrator.search.history import History
from orchestrator.search.objective import ACCURACY
from orchestrator.search.selection import win_contest
from orchestrator.search.strategies import STRATEGIES
from orchestrator.search.strategies.base import Proposal
from orchestrator.search.surface.batches import highest
from orchestrator.search.surface.lattice import Lattice
from orchestrator.search.surface.model import Surface, log_noise
from orchestrator.search.surface.observed import fitted
from orchestrator.search.task import SearchTask, StageRounds
from orchestrator.search.variant import SearchVariant, StageSeeds
from orchestrator.search.winner import finalists, winner
from search_spaces import Configuration, SearchSpace
from trainables.privacy.gaussian import mu_of

SCALES = {"learning_rate": "log", "rho": "log", "tau": "log", "beta": "complement", "beta1": "complement",
          "beta2": "complement"}  # fmt: skip
FINALISTS = 8
SEARCH_SEEDS, CONTEST_SEEDS = 3, 5
DELTA, ROUNDS = 1e-5, 70


@dataclass(frozen=True)
class Dense:
    """A dense table."""

    name: str
    method: str
    epsilons: tuple[float, ...]
    axes: Mapping[str, tuple[float, ...]]
    scores: np.ndarray
    """Validation accuracy by budget, seed and configuration, in the order of the grid; nan if the trial diverged."""

    @classmethod
    def read(cls, file: Path, method: str) -> Dense:
        rows = pd.read_csv(file)
        rows = rows[rows["stage"] == "coarse"]
        axes = {name: tuple(sorted(rows[name].unique())) for name in SCALES if name in rows}
        axes = {name: values for name, values in axes.items() if len(values) > 1}
        epsilons, seeds = (tuple(sorted(rows[name].unique())) for name in ("epsilon", "seed"))
        index = np.zeros(len(rows), dtype=int)
        for name, values in axes.items():
            index = index * len(values) + np.searchsorted(values, rows[name])
        shape = len(epsilons), len(seeds), int(np.prod([len(v) for v in axes.values()]))
        scores = np.full(shape, np.nan)
        place = np.searchsorted(epsilons, rows["epsilon"]), np.searchsorted(seeds, rows["seed"]), index
        scores[place] = rows["accuracy"]
        return cls(file.name.removesuffix(".csv.gz").removeprefix("dense-"), method, epsilons, axes, scores)

    @cached_property
    def means(self) -> np.ndarray:
        """By budget and configuration; a diverged trial scores 0."""
        return np.nan_to_num(self.scores).mean(1)

    def regret(self, budget: int, configuration: int) -> float:
        return float(self.means[budget].max() - self.means[budget, configuration])

    def space(self, every: int = 1) -> SearchSpace:
        """All values of the axes, or every n-th for the coarse grid of a grid search."""
        axes = {name: tuple(float(v) for v in values) for name, values in self.axes.items()}
        coarse = {name: values[(len(values) - 1) % every // 2 :: every] for name, values in axes.items()}
        return SearchSpace(self.method, coarse, axes, {name: SCALES[name] for name in axes})

    @cached_property
    def lattice(self) -> Lattice:
        return Lattice(self.space(), values=1)

    def nearest(self, configuration: Configuration) -> int:
        distance = ((self.lattice.points - self.lattice.coordinates([configuration])) ** 2).sum(1)
        return int(distance.argmin())


@dataclass
class Replay:
    """One repetition of a search of some budgets of a table."""

    table: Dense
    strategy: str
    trials: int | None
    """`search.trials`."""
    settings: Mapping[str, Any]
    budgets: Sequence[int]
    repetition: int
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    errors: list[float] = field(default_factory=list)
    """Predicted minus true scores of the choices at budgets without a trial."""
    _surface: Surface | None = None

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.repetition)
        count = self.table.scores.shape[1]
        order = [int(seed) for seed in random.permutation(count)]
        searching = min(SEARCH_SEEDS, count // 2)
        seeds = StageSeeds(order[:searching], order[searching : searching + CONTEST_SEEDS], [])
        strategy = STRATEGIES[self.strategy]
        given = {"seed": 1000 + self.repetition} if "seed" in strategy.Settings.model_fields else {}
        section = strategy.Settings(**given, **self.settings)
        self.variant = SearchVariant(strategy, "contest", section, seeds)
        space = self.table.space(every=2 if self.strategy == "grid" else 1)
        self.histories = []
        memo: dict[str, Any] = {}
        for budget in self.budgets:
            epsilon = self.table.epsilons[budget]
            task = SearchTask(
                space, StageRounds(ROUNDS, ROUNDS, ROUNDS), ACCURACY, 5000, self.trials, "zoom", section, epsilon,
                DELTA, tuple(seeds.search), noise_by_rounds=lambda rounds, e=epsilon: rounds**0.5 / mu_of(e, DELTA),
            )  # fmt: skip
            history = History(task, self.variant.seeds, self.outcomes, configurations={}, trial_seeds={})
            self.histories.append(history)
            if strategy.searches_budgets_together:
                history.memo = memo
        if strategy.searches_budgets_together:
            for history in self.histories:
                history.budgets = self.histories

    def run(self) -> None:
        """The search of all budgets, and the contests."""
        pending = dict(enumerate(self.histories))
        while pending:
            proposals = {n: self.variant.strategy.propose(h.task, h) for n, h in pending.items()}
            for number, proposal in proposals.items():
                if proposal is None:
                    del pending[number]
                else:
                    self._run(number, proposal)
        chosen = [finalists(self.variant, history, FINALISTS) for history in self.histories]
        for number, configurations in enumerate(chosen):
            self._run(number, Proposal("contest", configurations))

    def _run(self, number: int, proposal: Proposal) -> None:
        history = self.histories[number]
        stage = history.stages.setdefault(proposal.stage, [])
        for position, configuration in enumerate(proposal.configurations):
            index = self.table.nearest(configuration)
            own = self.variant.seeds(proposal.stage) if proposal.seeds is None else [proposal.seeds[position]]
            for seed in own:
                key = f"{number}:{index}:{seed}:{'c' if proposal.stage == 'contest' else 's'}"
                self.outcomes[key] = self._outcome(self.budgets[number], index, seed)
                history.configurations[key] = self.table.lattice.configurations[index]  # type: ignore[index]
                history.trial_seeds[key] = seed  # type: ignore[index]
                stage.append(key)

    @property
    def search_trials(self) -> list[int]:
        """Distinct trials of the search, by budget."""
        return [len({k for s, keys in h.stages.items() if s != "contest" for k in keys}) for h in self.histories]

    def winners(self) -> list[int]:
        """The winning configuration of every searched budget."""
        chosen = [winner(self.variant, history) for history in self.histories]
        assert all(chosen)
        return [int(choice.key.split(":")[1]) for choice in chosen if choice]

    def predicted(self, budgets: Sequence[int], *, contest: bool) -> Iterator[int]:
        """The best configuration at budgets that were not searched, by the surface of all trials; with a contest of
        the best ones, or without any trial there. Strategies without a surface use the winners of the two neighbouring
        budgets in the contest, or that of the next smaller one."""
        points = self.table.lattice.points
        if self.strategy == "surface" and self._surface is None:
            self._surface = fitted(self.histories, self.table.lattice, ("surface", "contest"))
        for budget in budgets:
            if self._surface is None:
                won = dict(zip(self.budgets, self.winners(), strict=True))
                finalists = [won[budget - 1], won[budget + 1]]
            else:
                searched = {number: self._noise(own) for number, own in enumerate(self.budgets)}
                expected = self._surface.between(points, self._noise(budget), searched)
                finalists = highest(expected.cautious, FINALISTS if contest else 1)
                self.errors += (
                    [] if contest else [expected.score[finalists[0]] - self.table.means[budget, finalists[0]]]
                )
            yield self._contest(budget, finalists) if contest else finalists[0]

    def _noise(self, budget: int) -> float:
        return log_noise(ROUNDS**0.5 / mu_of(self.table.epsilons[budget], DELTA))

    def _contest(self, budget: int, configurations: Sequence[int]) -> int:
        """The winner of a contest at a budget without a search."""
        candidates, outcomes = {}, {}
        for index in configurations:
            own = {f"{index}:{seed}": self._outcome(budget, index, seed) for seed in self.variant.seeds("contest")}
            outcomes |= own
            candidates[Candidate(tuple(own))] = index
        choice = win_contest(list(candidates), outcomes)
        return candidates[choice.candidate] if choice else configurations[0]

    def _outcome(self, budget: int, index: int, seed: int) -> Outcome:
        score = self.table.scores[budget, seed, index]
        return ("diverged", None, None) if np.isnan(score) else ("done", float(score), 0.0)
