"""Search spaces: one YAML file per method with its coarse grid, its fine grid and the scale of every axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from types import MappingProxyType

import yaml

from trainables import methods
from trainables.errors import UserError
from trainables.methods.base import Hyperparameter
from trainables.spec import HyperValue

Axis = tuple[HyperValue, ...]
Configuration = dict[str, HyperValue]
SCALES = ("log", "linear", "complement")  # complement: logarithmic in 1 - x, for what lives just below one
RUN_AXES = (
    Hyperparameter("clip", 10.0, "bound on what a record (or a user) contributes", low=0, open_low=True),
    Hyperparameter(
        "rounds", 50, "rounds of a run: more of them, with more noise in each", low=1, high=10**6, integer=True
    ),
)
"""What is no method's own and may still be searched over, in place of what the study says."""
RUN_NAMES = tuple(axis.name for axis in RUN_AXES)


@dataclass(frozen=True)
class SearchSpace:
    """What a method is tuned over. Axes are crossed; a configuration holds only the axes, not the fixed values."""

    method: str
    coarse: Mapping[str, Axis]
    fine: Mapping[str, Axis]
    scale: Mapping[str, str]
    fixed: Mapping[str, HyperValue] = field(default_factory=dict)

    def grid(self, axes: Mapping[str, Axis]) -> list[Configuration]:
        """Every combination, in grid order, each once."""
        names = list(axes)
        found = (dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values()))
        return unique({**self.fixed, **configuration} for configuration in found)

    def run_settings(self, *, clip: float, rounds: int) -> Configuration:
        """What a configuration of this space says beyond its method, given what its run had."""
        values: Configuration = {"clip": clip, "rounds": rounds}
        return {name: value for name, value in values.items() if name in self.coarse or name in self.fixed}

    def size(self, axes: Mapping[str, Axis]) -> int:
        """How many configurations `grid` has: no axis holds a value twice."""
        return math.prod(len(axis) for axis in axes.values())

    def changed(
        self,
        *,
        fixed: Mapping[str, HyperValue],
        coarse: Mapping[str, Sequence[HyperValue]],
        fine: Mapping[str, Sequence[HyperValue]],
        scale: Mapping[str, str] = MappingProxyType({}),
    ) -> SearchSpace:
        """With a study's overrides: a fixed hyperparameter is no axis any more, an axis given anew replaces the old.
        One that is added to the coarse grid alone has the same values in the fine one."""
        for name in scale:
            if name not in self.coarse and name not in coarse:
                raise UserError(f"{self.method}: scale of {name!r}, which is no axis")
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
    """The packaged space of a method."""
    methods.get(method)
    return _read(method)


def file_name(method: str) -> str:
    return f"{method.replace('-', '_')}.yaml"


def has(method: str) -> bool:
    """Whether there is a packaged space."""
    return (resources.files(__name__) / file_name(method)).is_file()


@cache
def _read(method: str) -> SearchSpace:
    if not has(method):
        raise UserError(
            f"method {method!r} has no search space; a study must give its coarse axes, or lie beside a file "
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
    """A space with every value checked against the method's own rules."""
    known = _known(method)

    def checked(axes: Mapping[str, Sequence[HyperValue]]) -> dict[str, Axis]:
        found = {}
        for name, values in axes.items():
            if name not in known:
                raise UserError(f"{method} has no hyperparameter {name!r}; it has: {', '.join(known)}")
            if not isinstance(values, list | tuple) or not values:
                raise UserError(f"{method}: axis {name} = {values!r} is not a list of values")
            found[name] = tuple(dict.fromkeys(known[name].check(value) for value in values))
        return found

    for name in fixed:
        if name not in known:
            raise UserError(f"{method} has no hyperparameter {name!r}; it has: {', '.join(known)}")
    fixed_values = {name: known[name].check(value) for name, value in fixed.items()}
    if set(coarse) != set(fine):
        odd = sorted(set(coarse) ^ set(fine))[0]
        raise UserError(f"{method}: axis {odd!r} is in only one of the coarse and the fine grid")
    for name in coarse:
        if name in fixed:
            raise UserError(f"{method}: {name!r} is both fixed and an axis")
    scales = {name: scale.get(name, "log" if name in RUN_NAMES else "linear") for name in coarse}
    for name, kind in scales.items():
        if kind not in SCALES:
            raise UserError(f"{method}: scale of {name} = {kind!r} is unknown; choose one of: {', '.join(SCALES)}")
    return SearchSpace(method, checked(coarse), checked(fine), scales, fixed_values)


def _known(method: str) -> dict[str, Hyperparameter]:
    """All that can be an axis."""
    return {h.name: h for h in (*methods.get(method).hyperparameters, *RUN_AXES)}


def unique(configurations: Iterable[Configuration]) -> list[Configuration]:
    seen: dict[tuple[tuple[str, HyperValue], ...], Configuration] = {}
    for configuration in configurations:
        seen.setdefault(tuple(sorted(configuration.items())), configuration)
    return list(seen.values())


# ---- refinement


def refine(space: SearchSpace, rule: str, winner: Configuration) -> list[Configuration]:
    """The fine grid. `table`: as printed. `zoom`: around the coarse winner."""
    if rule == "table":
        return space.grid(space.fine)
    known = _known(space.method)
    numeric = [name for name, axis in space.coarse.items() if is_numeric(axis)]
    steps = _zoom_steps(space)
    return space.grid(
        {
            name: zoom(known[name], axis, space.scale[name], winner[name], steps) if name in numeric else axis
            for name, axis in space.coarse.items()
        }
    )


def refined_size(space: SearchSpace, rule: str) -> int:
    """How many configurations `refine` will give, at most."""
    if rule == "table":
        return space.size(space.fine)
    return math.prod(
        2 * _zoom_steps(space) + 1 if is_numeric(axis) and len(axis) > 1 else len(axis)
        for axis in space.coarse.values()
    )


def kept_in_zoom(space: SearchSpace) -> int:
    """How many of them stand in the coarse grid too, at most: every second place of an axis."""
    return math.prod(
        min(len(axis), 2 * (_zoom_steps(space) // 2) + 1) if is_numeric(axis) else len(axis)
        for axis in space.coarse.values()
    )


def _zoom_steps(space: SearchSpace) -> int:
    """A grid grows with the power of its axes: 5^3 = 125, 3^4 = 81."""
    return 2 if sum(map(is_numeric, space.coarse.values())) <= 3 else 1


def refine_again(
    space: SearchSpace, tried: Mapping[str, Axis], winner: Configuration, axes: Iterable[str]
) -> list[Configuration]:
    """Closer to a winner on the axes in question, all others as it has them: half way to the values beside it that were
    tried, and where it sits on an edge half a coarse step and a whole one beyond. Only what has some new value."""
    known = _known(space.method)
    questioned = set(axes)
    grid = {
        name: _closer(known[name], tried[name], space.scale[name], winner[name])
        if name in questioned
        else (winner[name],)
        for name in space.coarse
    }
    return [configuration for configuration in space.grid(grid) if any(configuration[n] not in tried[n] for n in grid)]


def _closer(hyper: Hyperparameter, tried: Axis, scale: str, winner: HyperValue) -> Axis:
    values = sorted(float(value) for value in tried)
    scale = usable_scale(scale, values)
    places = [_forward(scale, value) for value in values]
    position, step = values.index(float(winner)), max(b - a for a, b in itertools.pairwise(places))
    here = places[position]
    below = [(here + places[position - 1]) / 2] if position > 0 else [here - step, here - step / 2]
    above = [(here + places[position + 1]) / 2] if position + 1 < len(places) else [here + step / 2, here + step]
    found: list[HyperValue] = [winner]
    for place in (*below, *above):
        value = _significant(_backward(scale, place))
        try:
            found.append(hyper.check(round(value) if hyper.integer else value))
        except UserError:
            continue  # beyond what the method allows
    return tuple(dict.fromkeys(found))


def is_numeric(axis: Axis) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in axis)


def zoom(hyper: Hyperparameter, axis: Axis, scale: str, winner: HyperValue, steps: int = 2) -> Axis:
    """The winner and `steps` points on either side, half a coarse step apart on the axis' scale. Where the winner sits
    on an edge the axis goes on beyond it by the same step, as far as the method allows."""
    values = sorted(float(value) for value in axis)
    if len(values) == 1:
        return axis
    scale = usable_scale(scale, values)
    position = values.index(float(winner))
    middle = _forward(scale, values[position])
    gaps = [_forward(scale, b) - _forward(scale, a) for a, b in itertools.pairwise(values)]
    down = gaps[position - 1] if position > 0 else gaps[0]
    up = gaps[position] if position < len(gaps) else gaps[-1]
    found: list[HyperValue] = []
    for k in range(-steps, steps + 1):
        neighbour = position + k // 2
        if k % 2 == 0 and 0 <= neighbour < len(values):
            value = values[neighbour]  # as it stands in the coarse grid: the same trial
        else:
            value = _significant(_backward(scale, middle + (up if k > 0 else down) * k / 2))
        try:
            found.append(hyper.check(round(value) if hyper.integer else value))
        except UserError:
            continue  # beyond what the method allows
    return tuple(dict.fromkeys(found))


def usable_scale(scale: str, values: Sequence[float]) -> str:
    """The axis' scale, or `linear` where a value has no place on it, as zero has none among logarithms."""
    outside = (scale == "log" and min(values) <= 0) or (scale == "complement" and max(values) >= 1)
    return "linear" if outside else scale


def on_edge(axis: Axis, value: HyperValue) -> bool:
    """Whether a value is the lowest or highest of a numeric axis that has others."""
    if not is_numeric(axis) or len(axis) < 2:
        return False
    numbers = [float(v) for v in axis]
    return float(value) in (min(numbers), max(numbers))


def _forward(scale: str, value: float) -> float:
    if scale == "log":
        return math.log(value)
    return -math.log1p(-value) if scale == "complement" else value


def _backward(scale: str, value: float) -> float:
    if scale == "log":
        return math.exp(value)
    return -math.expm1(-value) if scale == "complement" else value


def _significant(value: float, digits: int = 4) -> float:
    """Numbers a person would type; for values just below one the digits count from there."""
    if 0.9 < value < 1:
        return 1 - float(f"{1 - value:.{digits}g}")
    return float(f"{value:.{digits}g}")
