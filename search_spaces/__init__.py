"""Search spaces: one YAML file per method with a coarse grid, a fine grid, the scales of axes, and fixed values."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from types import MappingProxyType

import yaml

from trainables import methods
from trainables.errors import UserError, one_of
from trainables.methods.base import NETWORK_HYPERPARAMETERS, Hyperparameter
from trainables.spec import HyperValue

Axis = tuple[HyperValue, ...]
Configuration = dict[str, HyperValue]
SCALES = ("log", "linear", "complement")  # complement: logarithmic in 1 - x, for values just below one
RUN_AXES = (
    Hyperparameter("clip", 10.0, "bound on the contribution of a record (or user)", low=0, open_low=True),
    Hyperparameter(
        "rounds",
        50,
        "rounds of a run: more rounds have more noise in each",
        low=1,
        high=10**6,
        integer=True,
        shared=True,
    ),
)
"""Settings of a run that may be searched like hyperparameters; they override the study's values."""
RUN_NAMES = tuple(axis.name for axis in RUN_AXES)
NETWORK_NAMES = tuple(axis.name for axis in NETWORK_HYPERPARAMETERS)


@dataclass(frozen=True)
class SearchSpace:
    """The axes that a method is tuned over, and its fixed values."""

    method: str
    """Name of the method."""
    coarse: Mapping[str, Axis]
    """The values of every axis of the coarse grid, by hyperparameter."""
    fine: Mapping[str, Axis]
    """The same for the fine grid."""
    scale: Mapping[str, str]
    """log, linear or complement, by hyperparameter."""
    fixed: Mapping[str, HyperValue] = field(default_factory=dict)
    """Values that all configurations have."""

    def grid(self, axes: Mapping[str, Axis]) -> list[Configuration]:
        """All combinations of the values of `axes`, each with the fixed values. The last axis varies fastest."""
        names = list(axes)
        combinations = (dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values()))
        return unique({**self.fixed, **combination} for combination in combinations)

    def configuration(self, hyperparameters: Configuration, *, clip: float, rounds: int) -> Configuration:
        """The configuration of a trial: its hyperparameters, and the clip and rounds where this space sets them."""
        run_settings: Configuration = {"clip": clip, "rounds": rounds}
        own = {name: value for name, value in run_settings.items() if name in self.coarse or name in self.fixed}
        return {**hyperparameters, **own} if own else hyperparameters  # without a copy: there may be a million

    def size(self, axes: Mapping[str, Axis]) -> int:
        """The number of configurations of `grid`."""
        return math.prod(len(axis) for axis in axes.values())

    def with_overrides(
        self,
        *,
        fixed: Mapping[str, HyperValue],
        coarse: Mapping[str, Sequence[HyperValue]],
        fine: Mapping[str, Sequence[HyperValue]],
        scale: Mapping[str, str] = MappingProxyType({}),
    ) -> SearchSpace:
        """Apply a study's overrides. A fixed hyperparameter is no longer an axis. A given axis replaces the packaged
        axis or fixed value. An axis that is added only to the coarse grid has the same values in the fine grid."""
        for name in scale:
            if name not in self.coarse and name not in coarse:
                raise UserError(f"{self.method}: scale of {name!r}, which is not an axis")
        merged = {**{k: v for k, v in self.coarse.items() if k not in fixed}, **coarse}
        added = {k: v for k, v in coarse.items() if k not in self.coarse}
        return build(
            self.method,
            merged,
            {**added, **{k: v for k, v in self.fine.items() if k not in fixed}, **fine},
            {**self.scale, **scale},
            {**{k: v for k, v in self.fixed.items() if k not in coarse}, **fixed},
        )


def load(method: str) -> SearchSpace:
    """The packaged search space of a method."""
    methods.get(method)
    return _read(method)


def file_name(method: str) -> str:
    return f"{method.replace('-', '_')}.yaml"


def is_packaged(method: str) -> bool:
    """Whether the method has a packaged search space."""
    return (resources.files(__name__) / file_name(method)).is_file()


@cache
def _read(method: str) -> SearchSpace:
    if not is_packaged(method):
        raise UserError(
            f"method {method!r} has no search space; a study must give its coarse axes, or be next to a file "
            f"{file_name(method)}"
        )
    file = resources.files(__name__) / file_name(method)
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return build(method, content["coarse"], content["fine"], content.get("scale", {}), content.get("fixed", {}))


def build(
    method: str,
    coarse: Mapping[str, Sequence[HyperValue]],
    fine: Mapping[str, Sequence[HyperValue]],
    scale: Mapping[str, str],
    fixed: Mapping[str, HyperValue],
) -> SearchSpace:
    """A search space with every value checked by its hyperparameter."""
    searchable = hyperparameters_of(method)
    if set(coarse) != set(fine):
        name = min(set(coarse) ^ set(fine))
        raise UserError(f"{method}: axis {name!r} is in only one of the coarse and the fine grid")
    for name in (*fixed, *coarse):
        if name not in searchable:
            known = [name for name in searchable if name not in NETWORK_NAMES]
            raise UserError(f"{method} has no hyperparameter {name!r}; it has: {', '.join(known)}")
        if name in fixed and name in coarse:
            raise UserError(f"{method}: {name!r} is both fixed and an axis")
    scales = {name: scale.get(name, "log" if name in (*RUN_NAMES, *NETWORK_NAMES) else "linear") for name in coarse}
    for name, kind in scales.items():
        one_of(SCALES, **{f"{method}: scale of {name}": kind})

    def checked(axes: Mapping[str, Sequence[HyperValue]]) -> dict[str, Axis]:
        for name, values in axes.items():
            if not isinstance(values, list | tuple) or not values:
                raise UserError(f"{method}: axis {name} = {values!r} is not a list of values")
        return {n: tuple(dict.fromkeys(searchable[n].check(value) for value in axes[n])) for n in axes}

    fixed_values = {name: searchable[name].check(value) for name, value in fixed.items()}
    return SearchSpace(method, checked(coarse), checked(fine), scales, fixed_values)


def hyperparameters_of(method: str) -> dict[str, Hyperparameter]:
    """Everything that can be an axis."""
    return {h.name: h for h in (*NETWORK_HYPERPARAMETERS, *methods.get(method).hyperparameters, *RUN_AXES)}


def unique(configurations: Iterable[Configuration]) -> list[Configuration]:
    """Without duplicates, in order."""
    by_content: dict[tuple[tuple[str, HyperValue], ...], Configuration] = {}
    for configuration in configurations:
        by_content.setdefault(tuple(sorted(configuration.items())), configuration)
    return list(by_content.values())


# ---- refinement


def refine(space: SearchSpace, rule: str, winner: Configuration) -> list[Configuration]:
    """The fine grid. `table`: the fine axes of the space. `zoom`: around the winner of the coarse grid."""
    if rule == "table":
        return space.grid(space.fine)
    searchable, steps = hyperparameters_of(space.method), _zoom_steps(space)
    return space.grid(
        {
            name: zoom(searchable[name], axis, space.scale[name], winner[name], steps) if is_numeric(axis) else axis
            for name, axis in space.coarse.items()
        }
    )


def refined_size(space: SearchSpace, rule: str) -> int:
    """The largest number of configurations that `refine` can return."""
    if rule == "table":
        return space.size(space.fine)
    return math.prod(
        2 * _zoom_steps(space) + 1 if is_numeric(axis) and len(axis) > 1 else len(axis)
        for axis in space.coarse.values()
    )


def zoom_overlap(space: SearchSpace) -> int:
    """The largest number of configurations of `refine` with the rule `zoom` that are also in the coarse grid, for a
    winner on no edge. On a numeric axis, every second point of the fine grid is a value of the coarse grid."""
    return math.prod(
        min(len(axis), 2 * (_zoom_steps(space) // 2) + 1) if is_numeric(axis) else len(axis)
        for axis in space.coarse.values()
    )


def _zoom_steps(space: SearchSpace) -> int:
    """The number of points on either side of the winner: 2 with up to three numeric axes (at most 5^3 = 125
    configurations), 1 with more (3^4 = 81)."""
    return 2 if sum(map(is_numeric, space.coarse.values())) <= 3 else 1


def refine_again(
    space: SearchSpace, tried: Mapping[str, Axis], winner: Configuration, axes: Iterable[str]
) -> list[Configuration]:
    """New configurations around a winner on the given axes; the other axes keep its values. On each axis: half way to
    the neighbours that were tried, and on an edge half a step and a whole step beyond."""
    searchable, refined = hyperparameters_of(space.method), set(axes)
    grid = {
        name: _closer(searchable[name], tried[name], space.scale[name], value) if name in refined else (value,)
        for name, value in ((name, winner[name]) for name in space.coarse)
    }
    return [configuration for configuration in space.grid(grid) if any(configuration[n] not in tried[n] for n in grid)]


def _closer(hyper: Hyperparameter, tried: Axis, scale: str, winner: HyperValue) -> Axis:
    values = sorted(float(value) for value in tried)
    scale = usable_scale(scale, values)
    points = [forward(scale, value) for value in values]
    position, step = values.index(float(winner)), max(b - a for a, b in itertools.pairwise(points))
    point = points[position]
    below = [(point + points[position - 1]) / 2] if position > 0 else [point - step, point - step / 2]
    above = [(point + points[position + 1]) / 2] if position + 1 < len(points) else [point + step / 2, point + step]
    new = _valid(hyper, [_significant(_backward(scale, at)) for at in (*below, *above)])
    return tuple(dict.fromkeys([winner, *new]))


def _valid(hyper: Hyperparameter, values: Iterable[float]) -> list[HyperValue]:
    """The values that the hyperparameter allows, rounded if it is an integer."""
    valid = []
    for value in values:
        with contextlib.suppress(UserError):
            valid.append(hyper.check(round(value) if hyper.integer else value))
    return valid


def is_numeric(axis: Axis) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in axis)


def zoom(hyper: Hyperparameter, axis: Axis, scale: str, winner: HyperValue, steps: int = 2) -> Axis:
    """The winner and `steps` points on either side, half a coarse step apart on the axis' scale. If the winner is on an
    edge, the axis continues beyond it with the same step, as far as the method allows."""
    values = sorted(float(value) for value in axis)
    if len(values) == 1:
        return axis
    scale = usable_scale(scale, values)
    position = values.index(float(winner))
    middle = forward(scale, values[position])
    gaps = [forward(scale, b) - forward(scale, a) for a, b in itertools.pairwise(values)]
    down = gaps[position - 1] if position > 0 else gaps[0]
    up = gaps[position] if position < len(gaps) else gaps[-1]
    points = []
    for k in range(-steps, steps + 1):
        neighbour = position + k // 2
        if k % 2 == 0 and 0 <= neighbour < len(values):
            points.append(values[neighbour])  # exactly the value of the coarse grid, so that its trial is reused
        else:
            points.append(_significant(_backward(scale, middle + (up if k > 0 else down) * k / 2)))
    return tuple(dict.fromkeys(_valid(hyper, points)))


def usable_scale(scale: str, values: Sequence[float]) -> str:
    """The axis' scale, or `linear` if a value is outside its domain, as 0 is for `log`."""
    outside = (scale == "log" and min(values) <= 0) or (scale == "complement" and max(values) >= 1)
    return "linear" if outside else scale


def densified(space: SearchSpace, name: str, least: int) -> Axis:
    """The values of both grids on an axis; numbers are sorted. A numeric axis with at least two values gets more, until
    it has at least `least`: every gap is divided into equal steps on the axis' scale, none longer than a step between
    `least` equally spaced values. An axis of integers has fewer if there are not enough integers."""
    values = tuple(dict.fromkeys([*space.coarse[name], *space.fine[name]]))
    if not is_numeric(values) or len(values) < 2 or least < 2:
        return values if not is_numeric(values) else tuple(sorted(values, key=float))
    hyper = hyperparameters_of(space.method)[name]
    points: dict[float, HyperValue] = {}
    for value in values:
        points.setdefault(float(value), value)
    known = sorted(points)
    scale = usable_scale(space.scale[name], known)
    step = (forward(scale, known[-1]) - forward(scale, known[0])) / (least - 1)
    for low, high in itertools.pairwise(known):
        start, gap = forward(scale, low), forward(scale, high) - forward(scale, low)
        pieces = math.ceil(round(gap / step, 6))
        between = [_significant(_backward(scale, start + gap * n / pieces), 3) for n in range(1, pieces)]
        points.update((float(value), value) for value in _valid(hyper, between) if low < float(value) < high)
    return tuple(points[point] for point in sorted(points))


def continued(space: SearchSpace, name: str, axis: Axis, below: int, above: int, *, dense: bool = True) -> Axis:
    """New values beyond both ends of a numeric axis, up to `below` and `above` steps of the coarse grid away: a step
    apart, or if `dense`, about as close together as the values at that end. Values that the method does not allow are
    left out."""
    hyper, known = hyperparameters_of(space.method)[name], [float(value) for value in axis]
    scale = usable_scale(space.scale[name], known)
    new: dict[float, HyperValue] = {}
    for end, neighbour, sign, steps in ((known[0], known[1], -1, below), (known[-1], known[-2], 1, above)):
        step = end_step(space, name, axis, sign)
        pieces = max(1, round(step / abs(forward(scale, end) - forward(scale, neighbour)))) if dense else 1
        points = [forward(scale, end) + sign * step * n / pieces for n in range(1, steps * pieces + 1)]
        values = _valid(hyper, [_significant(_backward(scale, point), 3) for point in points])
        new.update((float(value), value) for value in values if (float(value) - end) * sign > 0)
    return tuple(new[value] for value in sorted(new))


def end_step(space: SearchSpace, name: str, axis: Axis, sign: int) -> float:
    """The step of the coarse grid at its lower end (sign -1) or upper end (sign 1), on the axis' scale. If the coarse
    grid has only one value: the step of `axis` at that end."""
    scale = usable_scale(space.scale[name], [float(value) for value in axis])
    values = sorted(float(value) for value in (space.coarse[name] if len(space.coarse[name]) > 1 else axis))
    points = [forward(scale, value) for value in values]
    return points[1] - points[0] if sign < 0 else points[-1] - points[-2]


def on_edge(axis: Axis, value: HyperValue) -> bool:
    """Whether a value is the lowest or highest of a numeric axis with at least two values."""
    if not is_numeric(axis) or len(axis) < 2:
        return False
    numbers = [float(v) for v in axis]
    return float(value) in (min(numbers), max(numbers))


def forward(scale: str, value: float) -> float:
    if scale == "log":
        return math.log(value)
    return -math.log1p(-value) if scale == "complement" else value


def _backward(scale: str, value: float) -> float:
    if scale == "log":
        return math.exp(value)
    return -math.expm1(-value) if scale == "complement" else value


def _significant(value: float, digits: int = 4) -> float:
    """Rounded to a few digits; for values just below one, the digits of 1 - value."""
    if 0.9 < value < 1:
        return 1 - float(f"{1 - value:.{digits}g}")
    return float(f"{value:.{digits}g}")
