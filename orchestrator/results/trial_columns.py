"""Trials that have ended, by column: with an object for each, a million trials would take too long."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

CHUNK = 1000  # trials in memory at a time


class TrialColumns(NamedTuple):
    """The fields of `Row`, a value per trial. All values were checked. `content`: the specification, read from JSON."""

    key: Sequence[str]
    spec: Sequence[str]
    state: Sequence[str]
    reason: Sequence[str]
    rounds: Sequence[int]
    accuracy: Sequence[float | None]
    loss: Sequence[float | None]
    metrics: Sequence[Mapping[str, Mapping[int, float]]]
    epsilon_claimed: Sequence[float]
    epsilon_local: Sequence[float]
    epsilon_secure: Sequence[float]
    epsilon_unsampled: Sequence[float]
    seconds: Sequence[float]
    correct: Sequence[bytes]
    content: Sequence[dict[str, Any]]

    @classmethod
    def of(cls, rows: Collection[Any]) -> TrialColumns:
        """The columns of some rows."""
        columns: Any = ([getattr(row, name) for row in rows] for name in cls._fields)
        return cls(*columns)

    def at(self, places: Sequence[int]) -> TrialColumns:
        """The trials at these positions."""
        columns: Any = ([column[place] for place in places] for column in self)
        return TrialColumns(*columns)
