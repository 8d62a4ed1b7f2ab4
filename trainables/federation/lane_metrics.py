"""What is noted while a pack runs: of all lanes at once, and told to each of them only when somebody asks.

After an evaluation there are some numbers of every lane. Told one by one, two thousand lanes take Python longer than
they take a GPU to compute the next rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainables.federation.lane_result import LaneResult


class LaneNotes:
    """Of lanes that stay the same: whoever changes them tells them first."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """A lane's share of the time that was taken."""
        self._names: tuple[str, ...] = ()
        self._pages: list[tuple[int, NDArray[np.float64]]] = []

    def page(self, t: int, names: Sequence[str], table: NDArray[np.float64]) -> None:
        """The metrics after round t, (metrics, lanes); the same ones every time."""
        self._names = tuple(names)
        self._pages.append((t, table))

    def tell(self, lanes: Sequence[LaneResult]) -> None:
        """Write all of it down lane by lane, and begin anew."""
        for lane in lanes:
            lane.seconds += self.seconds
        if self._pages:
            rounds = [t for t, _ in self._pages]
            curves = np.stack([table for _, table in self._pages], axis=-1).swapaxes(0, 1).tolist()
            for lane, of_lane in zip(lanes, curves, strict=True):
                lane.rounds = rounds[-1]
                for name, curve in zip(self._names, of_lane, strict=True):
                    lane.metrics.setdefault(name, {}).update(zip(rounds, curve, strict=True))
        self.seconds, self._pages = 0.0, []
