"""A search whose winner may be published: what is tried, and who wins.

How many runs there are is random and secret, each draws its configuration from the cell's fixed grid and has noise of
its own, and only one of them is ever shown: the one whose score, itself with noise, is highest. Then publishing it
costs what `private_selection` says, however many there were. Everything follows from one secret of the
cell, so a search that was interrupted goes on with the same runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import search_spaces
from orchestrator.search.contenders import Contender, Outcome
from orchestrator.search.selection import Choice
from orchestrator.study.cells import Cell
from orchestrator.study.settings import Study
from search_spaces import Configuration, SearchSpace
from trainables.privacy import private_selection
from trainables.privacy.noise import SERVER, Address


@dataclass(frozen=True)
class Draw:
    """One run of a private search."""

    configuration: Configuration
    seed: int
    """Of its noise and of no other run's."""


def fixed_grid(space: SearchSpace) -> list[Configuration]:
    """What configurations are drawn from: both grids as they are printed, for zooming would look at scores."""
    return search_spaces.unique([*space.grid(space.coarse), *space.grid(space.fine)])


def mean_runs(study: Study, space: SearchSpace) -> float:
    """How many runs there are on average: as the study says, or as many as the grid has configurations."""
    return float(study.search.trials or len(fixed_grid(space)))


def draws(cell: Cell, secret: bytes) -> list[Draw]:
    """All runs of a cell's search."""
    grid, settings = fixed_grid(cell.space), cell.study.search.private
    count = private_selection.RUNS[settings.runs].draw(mean_runs(cell.study, cell.space), _number(secret, -1))
    return [
        Draw(grid[_number(secret, 2 * run) % len(grid)], _number(secret, 2 * run + 1) % 2**63) for run in range(count)
    ]


def _number(secret: bytes, place: int) -> int:
    """128 bits that nobody can tell without the secret."""
    packed = place.to_bytes(8, "big", signed=True)
    return int.from_bytes(hashlib.blake2b(packed, key=secret, digest_size=16, person=b"fedsweep-search").digest())


def score_deviation(study: Study, epsilon: float, rows: int) -> float:
    """Standard deviation, in percent, of the noise on an accuracy measured on so many rows."""
    return 100 * private_selection.score_std(epsilon, study.privacy.delta, rows, study.search.private.score)


def best_of(seeds: Mapping[str, int], outcomes: Mapping[str, Outcome], deviation: float) -> Choice | None:
    """The run with the highest noisy score, of those that ran to their end. `seeds`: by trial, in the order drawn."""
    scores = {
        key: score + deviation * float(Address(seed, SERVER, 0, 0, "score").normal(1)[0])
        for key, seed in seeds.items()
        if (found := outcomes.get(key)) is not None and found[0] == "done" and (score := found[1]) is not None
    }
    if not scores:
        return None
    winner = max(scores, key=scores.__getitem__)  # the first of equals
    return Choice(Contender((winner,)), scores[winner], 0.0, 0, None)


def price(actual: float, claimed: float, study: Study, space: SearchSpace) -> float:
    """eps of publishing the winner of a search whose runs cost `actual` each, for scores made for `claimed`."""
    return private_selection.private_search(
        private_selection.with_score(actual, claimed, study.privacy.delta, study.search.private.score),
        mean_runs(study, space),
        study.privacy.delta,
        study.search.private.runs,
    )


def price_of_all(priced: Sequence[tuple[float, float, SearchSpace]], study: Study) -> float:
    """The same of several searches about the same records; of each what its runs cost, their claim and its space."""
    delta = study.privacy.delta
    return private_selection.private_searches(
        [
            (private_selection.with_score(actual, claimed, delta, study.search.private.score), mean_runs(study, space))
            for actual, claimed, space in priced
        ],
        delta,
        study.search.private.runs,
    )
