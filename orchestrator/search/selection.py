"""Which configuration wins: one rule, used by the search and by the tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainables.objective import ACCURACY, Objective

Outcome = tuple[str, float | None, float | None]
"""State, score (what the study's objective measures), loss: on the validation rows, after the last round."""


@dataclass(frozen=True)
class Choice:
    """The winner among the trials of a search."""

    key: str
    score: float
    trials: int
    diverged: int
    within_standard_error: int | None
    """Configurations, the winner among them, that the validation rows cannot tell from the winner; None where the
    score has no standard error."""


def rank(outcome: Outcome, objective: Objective = ACCURACY) -> tuple[float, float]:
    """Smaller is better: score first, then loss. What did not run to its end comes last."""
    state, score, loss = outcome
    if state != "done" or score is None or loss is None:
        return (math.inf, math.inf)
    return (objective.cost(score), loss)


def choose(
    keys: Sequence[str], outcomes: Mapping[str, Outcome], rows: int, objective: Objective = ACCURACY
) -> Choice | None:
    """The best by validation score; ties by validation loss, then by grid order. None if nothing ran to its end."""
    distinct = list(dict.fromkeys(keys))
    done = [key for key in distinct if outcomes[key][0] == "done"]
    if not done:
        return None
    winner = min(done, key=lambda key: rank(outcomes[key], objective))  # min keeps the first of equals: grid order
    best = outcomes[winner][1] or 0.0
    error = objective.standard_error(best, rows)
    near = None if error is None else sum(1 for key in done if (outcomes[key][1] or 0.0) >= best - error)
    diverged = sum(1 for key in distinct if outcomes[key][0] == "diverged")
    return Choice(winner, best, len(distinct), diverged, near)
