"""Which configuration wins: one rule, used by the search and by the tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Outcome = tuple[str, float | None, float | None]
"""State, accuracy in percent, loss: on the validation rows, after the last round."""


@dataclass(frozen=True)
class Choice:
    """The winner among the trials of a search."""

    key: str
    accuracy: float
    trials: int
    diverged: int
    within_standard_error: int
    """Configurations, the winner among them, that the validation rows cannot tell from the winner."""


def rank(outcome: Outcome) -> tuple[float, float]:
    """Smaller is better: accuracy first, then loss. What did not run to its end comes last."""
    state, accuracy, loss = outcome
    if state != "done" or accuracy is None or loss is None:
        return (math.inf, math.inf)
    return (-accuracy, loss)


def choose(keys: Sequence[str], outcomes: Mapping[str, Outcome], rows: int) -> Choice | None:
    """The best by validation accuracy; ties by validation loss, then by grid order. None if nothing ran to its end."""
    distinct = list(dict.fromkeys(keys))
    done = [key for key in distinct if outcomes[key][0] == "done"]
    if not done:
        return None
    winner = min(done, key=lambda key: rank(outcomes[key]))  # min keeps the first of equals: grid order
    best = outcomes[winner][1] or 0.0
    share = best / 100
    error = 100 * math.sqrt(share * (1 - share) / rows)
    near = sum(1 for key in done if (outcomes[key][1] or 0.0) >= best - error)
    diverged = sum(1 for key in distinct if outcomes[key][0] == "diverged")
    return Choice(winner, best, len(distinct), diverged, near)
