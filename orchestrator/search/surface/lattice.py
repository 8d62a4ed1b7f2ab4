"""The configurations that a surface search chooses from, and their coordinates for the model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

import search_spaces
from search_spaces import Axis, Configuration, SearchSpace

Array = NDArray[np.float64]
LARGEST = 3000
"""A lattice with more than twice as many points is replaced by a sample of this many."""
MOST_VALUES, FEWEST_VALUES = 33, 5
"""Approximate limits for the number of values of a numeric axis, if the study sets none."""


Beyond = Mapping[str, tuple[int, int]]
"""By how many steps of the coarse grid an axis continues below and above its ends, by name of the axis."""


class Lattice:
    """All combinations of the axes' values, with more values where the grids leave gaps.

    Its advantages over continuous ranges: configurations have round values, neighbours differ enough to compare them
    in a contest, and trials are shared with a grid search of the same space.

    A hyperparameter that all lanes of a pack share, such as the number of local steps, has only the values of the
    grids: with more values, most packs would have a single trial, which costs several times as much. Where packs
    save no time, it has values between them, too."""

    def __init__(
        self,
        space: SearchSpace,
        values: int | None = None,
        beyond: Beyond | None = None,
        *,
        packs_save_time: bool = True,
    ) -> None:
        """`values`: least number of values of a numeric axis; default: it depends on the number of axes. `beyond`: by
        how many steps axes continue below and above their ends."""
        hypers = search_spaces.hyperparameters_of(space.method)
        dense = {name for name in space.coarse if not (packs_save_time and hypers[name].shared)}
        self._shared = [name for name in space.coarse if packs_save_time and hypers[name].shared]
        numeric = sum(search_spaces.is_numeric(space.coarse[name]) and len(space.coarse[name]) > 1 for name in dense)
        least = values or max(FEWEST_VALUES, min(MOST_VALUES, int(LARGEST ** (1 / max(1, numeric)))))
        self.space = space

        def axes(least: int) -> dict[str, Axis]:
            return {name: search_spaces.densified(space, name, least if name in dense else 1) for name in space.coarse}

        self.axes = axes(least)
        while values is None and self.size > 2 * LARGEST and least > FEWEST_VALUES:
            least -= 1
            self.axes = axes(least)
        self._scales = [_AxisScale(space, name, axis) for name, axis in self.axes.items()]
        self.beyond = beyond or {}
        self._new = {
            name: search_spaces.continued(space, name, self.axes[name], *steps, dense=name in dense)
            for name, steps in self.beyond.items()
        }

    @property
    def size(self) -> int:
        """The number of all combinations, without values beyond the ends of the axes."""
        return math.prod(map(len, self.axes.values()))

    @cached_property
    def configurations(self) -> list[Configuration]:
        """In a fixed order; a sample if the lattice is large. Configurations beyond the ends of the axes come last."""
        found, axes = self._combined(self.axes), dict(self.axes)
        for name, new in self._new.items():
            found += self._combined({**axes, name: new}) if new else []
            axes[name] = (*axes[name], *new)
        return found

    def _combined(self, axes: Mapping[str, Axis]) -> list[Configuration]:
        """All combinations of these values; a sample if there are many."""
        if math.prod(map(len, axes.values())) <= 2 * LARGEST:
            return self.space.grid(axes)
        picks = _spread(list(map(len, axes.values())), LARGEST, seed=0)
        rows = ({name: axes[name][i] for name, i in zip(axes, row, strict=True)} for row in picks)
        return search_spaces.unique({**self.space.fixed, **row} for row in rows)

    @cached_property
    def points(self) -> Array:
        """The coordinates of all configurations."""
        return self.coordinates(self.configurations)

    @cached_property
    def positions(self) -> dict[tuple[object, ...], int]:
        """The index of every configuration in `configurations`, by `identity`."""
        return {self.identity(configuration): number for number, configuration in enumerate(self.configurations)}

    def identity(self, configuration: Configuration) -> tuple[object, ...]:
        """The values of a configuration on all axes."""
        return tuple(configuration[name] for name in self.axes)

    def rounds(self, default: int) -> NDArray[np.int64]:
        """The rounds of every configuration; `default` if rounds are not a hyperparameter of the space."""
        return np.array([int(configuration.get("rounds", default)) for configuration in self.configurations])

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """A number for every configuration: the same for those that can share a pack."""
        numbers: dict[tuple[object, ...], int] = {}
        keys = (tuple(configuration[name] for name in self._shared) for configuration in self.configurations)
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys])

    def design(self, count: int, seed: int) -> list[Configuration]:
        """`count` configurations that fill the space evenly, for the first trials."""
        names = list(self.axes)
        return [
            {**self.space.fixed, **{name: self.axes[name][i] for name, i in zip(names, row, strict=True)}}
            for row in _spread(list(map(len, self.axes.values())), count, seed)
        ]

    def steps_beyond(self, configurations: Sequence[Configuration]) -> Beyond:
        """By how many steps the axes must continue to contain these configurations."""
        found = {}
        for (name, axis), scale in zip(self.axes.items(), self._scales, strict=True):
            if not scale.numeric or len(axis) < 2:
                continue
            values = [float(configuration[name]) for configuration in configurations]
            lengths = [search_spaces.end_step(self.space, name, axis, sign) for sign in (-1, 1)]
            steps = [math.ceil(far / step - 0.01) for far, step in zip(scale.beyond(values), lengths, strict=True)]
            if any(steps):
                found[name] = (steps[0], steps[1])
        return found

    def with_next_steps(self, best: Sequence[Configuration]) -> Beyond:
        """`beyond`, with one more step at each end of an axis where one of these configurations lies."""
        found = dict(self.beyond)
        for name, axis in self.axes.items():
            every = (*axis, *self._new.get(name, ()))
            if search_spaces.is_numeric(axis) and len(axis) > 1:
                low, high = min(map(float, every)), max(map(float, every))
                at = {float(configuration[name]) for configuration in best}
                below, above = found.get(name, (0, 0))
                steps = (below + (low in at), above + (high in at))
                if any(steps):
                    found[name] = steps
        return found

    def coordinates(self, configurations: Sequence[Configuration]) -> Array:
        """One row per configuration. A numeric axis has one column, from 0 to 1 between its ends on its scale; other
        axes have a column for each value."""
        columns = [
            scale.column([configuration[name] for configuration in configurations])
            for name, scale in zip(self.axes, self._scales, strict=True)
        ]
        return np.concatenate(columns, axis=1) if columns else np.zeros((len(configurations), 0))

    @property
    def is_numeric(self) -> list[bool]:
        """For each column of the coordinates: whether its axis is numeric."""
        return list(itertools.chain.from_iterable([scale.numeric] * scale.width for scale in self._scales))


def _spread(sizes: Sequence[int], count: int, seed: int) -> list[tuple[int, ...]]:
    """`count` Sobol points, which fill the space evenly. A point has an index into the values of each axis."""
    from scipy.stats import qmc  # slow to import

    units = qmc.Sobol(len(sizes), seed=seed).random_base2(max(0, math.ceil(math.log2(count))))[:count]
    return [tuple(min(int(u * n), n - 1) for u, n in zip(row, sizes, strict=True)) for row in units]


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
        """The coordinates of values. Two different values of an axis that is not numeric have distance 1."""
        if not self.numeric:
            return np.array([[float(value == own) for own in self.values] for value in values]) / math.sqrt(2)
        points = [search_spaces.forward(self._scale, float(value)) for value in values]  # type: ignore[arg-type]
        return np.array([[(point - self._low) / self._length] for point in points])

    def beyond(self, values: Sequence[float]) -> tuple[float, float]:
        """How far values lie below the lowest and above the highest value of the axis, on its scale."""
        points = [search_spaces.forward(self._scale, value) for value in values]
        high = self._low + self._length
        return max(0.0, self._low - min(points, default=high)), max(0.0, max(points, default=self._low) - high)
