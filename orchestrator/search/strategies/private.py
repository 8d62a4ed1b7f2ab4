"""A private search: its winner may be published.

The number of runs is random and secret. Each run draws its configuration from the cell's fixed grid, has its own
noise, and only one run is ever shown: the one with the best noisy score. Publishing it costs what
`trainables.privacy.private_selection` computes, however many runs there were. All draws follow from one secret of the
cell, so an interrupted search continues with the same runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

import search_spaces
from orchestrator.search.candidates import Candidate, Outcomes
from orchestrator.search.history import History
from orchestrator.search.objective import ACCURACY, Objective
from orchestrator.search.selection import Choice
from orchestrator.search.strategies.base import Proposal, Strategy
from orchestrator.search.task import SearchTask, StageRounds
from orchestrator.section import Section
from search_spaces import Configuration, SearchSpace
from trainables import metrics
from trainables.privacy import private_selection
from trainables.privacy.noise import SERVER, Address, keyed
from trainables.privacy.private_selection import Search


class PrivateSettings(Section):
    """A search of which only the winner is shown; docs/privacy.md explains its cost."""

    runs: Literal["geometric", "logarithmic"] = "geometric"
    """Distribution of the secret number of runs; `trials` is its mean."""
    score: float = Field(default=1.0, gt=0, le=10)
    """The mu of a run's score, relative to the mu of the run. Up to 1 it adds no cost, because no record is used for
    both training and validation."""


class Private(Strategy):
    name = "private"
    stages = ("private",)
    Settings = PrivateSettings
    samples_ranges = False
    publishes_only_winner = True

    def propose(self, task: SearchTask, history: History) -> Proposal | None:
        if "private" in history.stages:
            return None
        grid, settings = fixed_grid(task.space), PrivateSettings.of(task.settings)
        count = private_selection.RUNS[settings.runs].draw(mean_runs(task.trials, task.space), _draw(task.secret, -1))
        return Proposal(
            "private",
            [grid[_draw(task.secret, 2 * run) % len(grid)] for run in range(count)],
            seeds=[_draw(task.secret, 2 * run + 1) % 2**63 for run in range(count)],
        )

    def expected(self, task: SearchTask) -> dict[str, int]:
        return {"private": round(mean_runs(task.trials, task.space))}

    def planned_rounds(self, stage: str, rounds: StageRounds) -> int:
        return rounds.confirm

    def choose(self, task: SearchTask, history: History) -> Choice | None:
        """The run with the best noisy score, once all have ended."""
        keys = history.stages.get("private", [])
        if not keys or any(key not in history.outcomes for key in keys):
            return None
        seeds = {key: history.trial_seeds[key] for key in keys}
        return noisy_best(seeds, history.outcomes, score_deviation(task), task.secret, task.objective)


def noisy_best(
    seeds: Mapping[str, int],
    outcomes: Outcomes,
    deviation: float,
    secret: bytes = b"",
    objective: Objective = ACCURACY,
) -> Choice | None:
    """The run with the best noisy score among those that finished. `seeds`: of all runs, by trial key."""
    purpose = keyed("score", noise_key(secret))
    scores = {
        key: score + deviation * float(Address(seed, SERVER, 0, 0, purpose).normal(1)[0])
        for key, seed in seeds.items()
        for state, score, _ in [outcomes[key]]
        if state == "done" and score is not None
    }
    if not scores:
        return None
    winner = min(scores, key=lambda key: objective.cost(scores[key]))  # the first of equals
    return Choice(Candidate((winner,)), scores[winner], 0.0, 0, None)


def fixed_grid(space: SearchSpace) -> list[Configuration]:
    """The configurations to draw from: both grids as they are written, since zooming would depend on scores."""
    return search_spaces.unique([*space.grid(space.coarse), *space.grid(space.fine)])


def mean_runs(trials: int | None, space: SearchSpace) -> float:
    """Mean number of runs: `search.trials`, or the size of the grid."""
    return float(trials or len(fixed_grid(space)))


def score_deviation(task: SearchTask) -> float:
    """Standard deviation of the noise on a run's validation score."""
    score = PrivateSettings.of(task.settings).score
    influence = metrics.get(task.objective.metric).row_influence
    assert influence is not None  # a study whose metric has none is rejected
    return influence * private_selection.score_std(task.epsilon, task.delta, task.validation_rows, score)


def noise_key(secret: bytes) -> str:
    """The key of all noise of the search, derived from the cell's secret alone; empty without a secret."""
    return f"{_draw(secret, -2):032x}" if secret else ""


def _draw(secret: bytes, index: int) -> int:
    """128 pseudorandom bits that cannot be predicted without the secret. `index`: -2 for the noise key, -1 for the
    number of runs, 2 r for the configuration of run r, 2 r + 1 for its seed."""
    packed = index.to_bytes(8, "big", signed=True)
    return int.from_bytes(hashlib.blake2b(packed, key=secret, digest_size=16, person=b"fedsweep-search").digest())


def priced(actual: float, claimed: float, mean: float, delta: float, settings: PrivateSettings) -> Search:
    """The search as input of the privacy account. Each run has the eps `actual`, and its score is calibrated for
    the eps `claimed`."""
    return Search(private_selection.with_score(actual, claimed, delta, settings.score), mean, settings.runs)
