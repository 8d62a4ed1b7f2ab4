"""Metrics of all lanes of a pack, buffered round by round.

Writing the metrics of two thousand lanes one by one takes Python longer than the GPU takes for the next rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainables.federation.lane_result import LaneResult


class MetricsBuffer:
    """Holds the metrics of a fixed set of lanes: call `flush` before the set changes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """A lane's share of the time spent since the last flush."""
        self._names: tuple[str, ...] = ()
        self._tables: list[tuple[int, NDArray[np.float64]]] = []

    def add(self, t: int, names: Sequence[str], table: NDArray[np.float64]) -> None:
        """The metrics after round t, (metrics, lanes). `names` is the same in every call."""
        self._names = tuple(names)
        self._tables.append((t, table))

    def flush(self, lanes: Sequence[LaneResult]) -> None:
        """Write the buffered metrics into the lanes' results."""
        for lane in lanes:
            lane.seconds += self.seconds
        if self._tables:
            rounds = [t for t, _ in self._tables]
            by_lane = np.stack([table for _, table in self._tables], axis=-1).swapaxes(0, 1).tolist()
            for lane, curves in zip(lanes, by_lane, strict=True):
                lane.rounds = rounds[-1]
                for name, curve in zip(self._names, curves, strict=True):
                    lane.metrics.setdefault(name, {}).update(zip(rounds, curve, strict=True))
        self.seconds, self._tables = 0.0, []
