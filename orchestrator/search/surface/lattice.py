"""The configurations that a surface search chooses from, and their coordinates for the model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.stats import qmc

import search_spaces
from search_spaces import Axis, Configuration, SearchSpace

Array = NDArray[np.float64]
LARGEST = 3000
"""Approximate limit for the points of a lattice; larger ones are sampled."""
MOST_VALUES, FEWEST_VALUES = 33, 5
"""Approximate limits for the values of a numeric axis, if the study sets none."""


class Lattice:
    """All combinations of the axes' values, with more values where the grids leave gaps.

    A lattice instead of continuous ranges: configurations have round values, neighbours differ enough to compare them
    in a contest, and trials are shared with a grid search of the same space."""

    def __init__(self, space: SearchSpace, values: int | None = None) -> None:
        """`values`: least number of values of a numeric axis; default: by the number of axes."""
        numeric = sum(search_spaces.is_numeric(axis) and len(axis) > 1 for axis in space.coarse.values())
        least = values or max(FEWEST_VALUES, min(MOST_VALUES, int(LARGEST ** (1 / max(1, numeric)))))
        self.space = space
        self.axes = {name: search_spaces.densified(space, name, least) for name in space.coarse}
        while values is None and self._size > 2 * LARGEST and least > FEWEST_VALUES:
            least -= 1
            self.axes = {name: search_spaces.densified(space, name, least) for name in space.coarse}
        self._scales = [_AxisScale(space, name, axis) for name, axis in self.axes.items()]

    @property
    def _size(self) -> int:
        return math.prod(map(len, self.axes.values()))

    @cached_property
    def configurations(self) -> list[Configuration]:
        """In a fixed order; a sample if the lattice is large."""
        if self._size <= 2 * LARGEST:
            return self.space.grid(self.axes)
        values = [tuple(axis) for axis in self.axes.values()]
        picks = self.spread(LARGEST, seed=0)
        rows = ({name: v[i] for name, v, i in zip(self.axes, values, row, strict=True)} for row in picks)
        return search_spaces.unique({**self.space.fixed, **row} for row in rows)

    @cached_property
    def points(self) -> Array:
        """The coordinates of all configurations."""
        return self.coordinates(self.configurations)

    def spread(self, count: int, seed: int) -> list[tuple[int, ...]]:
        """Points that fill the space evenly: indices of values by axis."""
        sequence = qmc.Sobol(len(self.axes), seed=seed)
        units = sequence.random_base2(max(0, math.ceil(math.log2(count))))[:count]
        sizes = [len(axis) for axis in self.axes.values()]
        return [tuple(min(int(u * n), n - 1) for u, n in zip(row, sizes, strict=True)) for row in units]

    def design(self, count: int, seed: int) -> list[Configuration]:
        """Configurations that fill the space evenly, to start from."""
        names = list(self.axes)
        return [
            {**self.space.fixed, **{name: self.axes[name][i] for name, i in zip(names, row, strict=True)}}
            for row in self.spread(count, seed)
        ]

    def coordinates(self, configurations: Sequence[Configuration]) -> Array:
        """Numeric axes from 0 to 1 on their scale; a column for every value of the others."""
        columns = [
            scale.column([configuration[name] for configuration in configurations])
            for name, scale in zip(self.axes, self._scales, strict=True)
        ]
        return np.concatenate(columns, axis=1) if columns else np.zeros((len(configurations), 0))

    @property
    def is_numeric(self) -> list[bool]:
        """By column of the coordinates."""
        return list(itertools.chain.from_iterable([scale.numeric] * scale.width for scale in self._scales))


class _AxisScale:
    """Maps the values of one axis to coordinates."""

    def __init__(self, space: SearchSpace, name: str, axis: Axis) -> None:
        self.numeric = search_spaces.is_numeric(axis)
        self.values = axis
        self.width = 1 if self.numeric else len(axis)
        if self.numeric:
            numbers = [float(value) for value in axis]
            self._scale = search_spaces.usable_scale(space.scale[name], numbers)
            ends = [search_spaces.forward(self._scale, number) for number in (min(numbers), max(numbers))]
            self._low, self._length = ends[0], (ends[1] - ends[0]) or 1.0

    def column(self, values: Sequence[object]) -> Array:
        if not self.numeric:
            return np.array([[float(value == own) for own in self.values] for value in values]) / math.sqrt(2)
        points = [search_spaces.forward(self._scale, float(value)) for value in values]  # type: ignore[arg-type]
        return np.array([[(point - self._low) / self._length] for point in points])
