"""Replays search strategies on dense tables, which hold every configuration at every budget with several seeds.

A strategy proposes configurations; each gets the score of the nearest configuration of the table. The contest runs on
seeds that the search does not use. The regret of the winner is how far its mean over all seeds of the table lies below
the best mean, in points of validation accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from orchestrator.search.surface.model import Expected, Surface, log_noise
from orchestrator.search.surface.observed import fitted
from orchestrator.search.task import SearchTask, StageRounds
from orchestrator.search.variant import SearchVariant
from orchestrator.search.winner import finalists, winner
from search_spaces import Configuration, SearchSpace
from trainables.privacy.gaussian import mu_of

SCALES = {
    **dict.fromkeys(
        ("learning_rate", "rho", "tau", "server_learning_rate", "client_learning_rate", "local_steps"), "log"
    ),
    **dict.fromkeys(("beta", "beta1", "beta2"), "complement"),
}
FINALISTS = 8
VALIDATION_ROWS = {"cifar10": 5000, "crc5": 1288}
SEARCH_SEEDS, CONTEST_SEEDS = 3, 5
DELTA, ROUNDS = 1e-5, 70
RUNGS = (8, 24)
"""Rounds after which successive halving, with its default settings, compares configurations."""


@dataclass(frozen=True)
class Dense:
    """A dense table."""

    name: str
    method: str
    epsilons: tuple[float, ...]
    axes: Mapping[str, tuple[float, ...]]
    by_round: Mapping[int, np.ndarray]
    """Validation accuracy by budget, seed and configuration, in the order of the grid; nan if the trial diverged. By
    round: after all rounds, and after the rungs of successive halving where they are known."""

    @property
    def scores(self) -> np.ndarray:
        """The scores after all rounds."""
        return self.by_round[ROUNDS]

    @classmethod
    def read(cls, file: Path, method: str, rungs: Path | None = None) -> Dense:
        """`rungs`: the file with accuracies after fewer rounds (see benchmarks/dense.py)."""
        rows = pd.read_csv(file)
        rows = rows[rows["stage"] == "coarse"]
        axes = {name: tuple(sorted(rows[name].unique())) for name in SCALES if name in rows}
        axes = {name: values for name, values in axes.items() if len(values) > 1}
        epsilons, seeds = (tuple(sorted(rows[name].unique())) for name in ("epsilon", "seed"))
        shape = len(epsilons), len(seeds), int(np.prod([len(v) for v in axes.values()]))

        def scores(rows: pd.DataFrame, column: str) -> np.ndarray:
            index = np.zeros(len(rows), dtype=int)
            for name, values in axes.items():
                index = index * len(values) + _positions(values, rows[name])
            found = np.full(shape, np.nan)
            found[_positions(epsilons, rows["epsilon"]), _positions(seeds, rows["seed"]), index] = rows[column]
            return found

        by_round = {ROUNDS: scores(rows, "accuracy")}
        if rungs is not None and rungs.exists():
            early = pd.read_csv(rungs)
            by_round |= {rung: scores(early, f"accuracy_{rung}") for rung in RUNGS}
        return cls(file.name.removesuffix(".csv.gz").removeprefix("dense-"), method, epsilons, axes, by_round)

    @cached_property
    def means(self) -> np.ndarray:
        """Mean accuracy over the seeds, by budget and configuration; a diverged trial scores 0."""
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


def _noise(epsilon: float) -> Callable[[int], float]:
    """The noise multiplier as a function of the number of rounds."""
    return lambda rounds: float(rounds**0.5 / mu_of(epsilon, DELTA))


def _positions(values: Sequence[float], column: pd.Series) -> np.ndarray:
    """The index of the nearest value, because files may round differently."""
    distances = np.abs(np.asarray(values)[None] - column.to_numpy(dtype=float)[:, None])
    return distances.argmin(1)


@dataclass
class Replay:
    """One repetition of a search at some budgets of a table."""

    table: Dense
    strategy: str
    trials: int | None
    """`search.trials`."""
    settings: Mapping[str, Any]
    budgets: Sequence[int]
    """The searched budgets, as indices into `table.epsilons`."""
    repetition: int
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    predictions: list[tuple[bool, float, float, float]] = field(default_factory=list)
    """What `fedsweep frontier` would state: whether the budget was searched, the expected score, its standard
    deviation, and the true score of the configuration."""

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.repetition)
        count = self.table.scores.shape[1]
        order = [int(seed) for seed in random.permutation(count)]
        searching = min(SEARCH_SEEDS, count // 2)
        contest = order[searching : searching + CONTEST_SEEDS]
        strategy = STRATEGIES[self.strategy]
        given = {"seed": 1000 + self.repetition} if "seed" in strategy.Settings.model_fields else {}
        section = strategy.Settings(**given, **self.settings)
        self.variant = SearchVariant(strategy, "contest", section, order[:searching], contest, [])
        space = self.table.space(every=2 if self.strategy == "grid" else 1)
        rows = VALIDATION_ROWS[self.table.name.rpartition("-")[2]]
        self.histories = []
        memo: dict[str, Any] = {}
        for budget in self.budgets:
            epsilon = self.table.epsilons[budget]
            task = SearchTask(
                space, StageRounds(ROUNDS, ROUNDS, ROUNDS), ACCURACY, rows, self.trials, "zoom", section, epsilon,
                DELTA, tuple(order[:searching]), noise_by_rounds=_noise(epsilon), budgets=len(self.budgets),
            )  # fmt: skip
            history = History(task, self.variant.seeds, self.outcomes, configurations={}, trial_seeds={})
            self.histories.append(history)
            if strategy.searches_budgets_together:
                history.memo = memo
        if strategy.searches_budgets_together:
            for history in self.histories:
                history.budgets = self.histories

    def run(self) -> None:
        """Search all budgets, then run their contests."""
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
        last = self.variant.last_round(proposal.stage, ROUNDS)
        for position, configuration in enumerate(proposal.configurations):
            index = self.table.nearest(configuration)
            own = self.variant.seeds(proposal.stage) if proposal.seeds is None else [proposal.seeds[position]]
            for seed in own:
                key = f"{number}:{index}:{seed}:{last}:{'c' if proposal.stage == 'contest' else 's'}"
                self.outcomes[key] = self._outcome(self.budgets[number], index, seed, last)
                history.configurations[key] = self.table.lattice.configurations[index]  # type: ignore[index]
                history.trial_seeds[key] = seed  # type: ignore[index]
                stage.append(key)

    @property
    def search_rounds(self) -> list[int]:
        """Trial-rounds of the search, by budget. Trials of a higher rung continue those of the rung below."""
        found = []
        for history in self.histories:
            last: dict[tuple[str, str], int] = {}
            for key in (key for stage, keys in history.stages.items() if stage != "contest" for key in keys):
                _, index, seed, rounds, _ = key.split(":")
                last[index, seed] = max(int(rounds), last.get((index, seed), 0))
            found.append(sum(last.values()))
        return found

    def winners(self) -> list[int]:
        """The winning configuration of every searched budget."""
        chosen = [winner(self.variant, history) for history in self.histories]
        assert all(chosen)
        return [int(choice.key.split(":")[1]) for choice in chosen if choice]

    def predicted(self, budgets: Sequence[int], *, contest: bool) -> Iterator[int]:
        """The configuration chosen at budgets that were not searched.

        With a contest: its finalists are the winners of the two neighbouring budgets and, for `surface`, the best
        configurations by the surface of all trials. Without a contest no trial runs at the budget: `surface` uses the
        best configuration by the surface, other strategies the winner of the next smaller budget."""
        won = dict(zip(self.budgets, self.winners(), strict=True))
        for budget in budgets:
            if self.strategy == "surface":
                expected = self.expected(budget)
                finalists = highest(expected.cautious, FINALISTS)
                if contest:
                    finalists = list(dict.fromkeys([won[budget - 1], won[budget + 1], *finalists]))[:FINALISTS]
                else:
                    self._predict(budget, expected, finalists[0], searched=False)
            else:
                finalists = [won[budget - 1], won[budget + 1]]
            yield self._contest(budget, finalists) if contest else finalists[0]

    @cached_property
    def surface(self) -> Surface:
        """The surface, fitted to all trials of the searches and contests."""
        return fitted(self.histories, self.table.lattice, ("surface", "contest"))

    def expected(self, budget: int) -> Expected:
        """The expected scores of all configurations at a budget that was not searched."""
        searched = {number: self.noise(own) for number, own in enumerate(self.budgets)}
        return self.surface.between(self.table.lattice.points, searched).at(self.noise(budget))

    def predict_searched(self) -> None:
        """Add the predictions at the searched budgets."""
        for number, budget in enumerate(self.budgets):
            expected = self.surface.expected(self.table.lattice.points, self.noise(budget), number)
            self._predict(budget, expected, highest(expected.cautious, 1)[0], searched=True)

    def _predict(self, budget: int, expected: Expected, index: int, *, searched: bool) -> None:
        true = float(self.table.means[budget, index])
        self.predictions.append((searched, float(expected.score[index]), float(expected.deviation[index]), true))

    def noise(self, budget: int) -> float:
        return log_noise(_noise(self.table.epsilons[budget])(ROUNDS))

    def _contest(self, budget: int, configurations: Sequence[int]) -> int:
        """The winner of a contest at a budget without a search."""
        candidates: dict[Candidate, int] = {}
        outcomes: dict[str, Outcome] = {}
        for index in configurations:
            own = {f"{index}:{seed}": self._outcome(budget, index, seed) for seed in self.variant.seeds("contest")}
            outcomes |= own
            candidates[Candidate(tuple(own))] = index
        steady = self.variant.strategy.prefers_small_spread
        choice = win_contest(list(candidates), outcomes, prefer_small_spread=steady)
        return candidates[choice.candidate] if choice else configurations[0]

    def _outcome(self, budget: int, index: int, seed: int, rounds: int = ROUNDS) -> Outcome:
        score = self.table.by_round[rounds][budget, seed, index]
        return ("diverged", None, None) if np.isnan(score) else ("done", float(score), 0.0)
