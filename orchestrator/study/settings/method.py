"""The `methods` section: a method with the study's changes to its search space."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

import search_spaces
from orchestrator.section import Section
from orchestrator.study.settings.preprocess import ADAPTIVE, PreprocessSettings
from search_spaces import SearchSpace
from trainables.choices import Aggregate, Precision
from trainables.errors import LOAD_A_PLUGIN, UserError, choices
from trainables.methods import METHODS
from trainables.models.network_settings import NetworkSettings
from trainables.privacy.plan import Clipping
from trainables.spec import HyperValue

LARGEST_GRID = 100_000
"""Most configurations of a method in one stage: more than anyone runs, and still planned in seconds."""


def _model_text(value: Any) -> Any:
    """Convert a network that is given as a mapping to text, which becomes part of a trial."""
    if not isinstance(value, dict):
        return value
    try:
        return NetworkSettings.from_mapping(value).text
    except UserError as error:
        raise ValueError(str(error).removeprefix("model: ")) from None


ModelText = Annotated[str, BeforeValidator(_model_text)]


class SpaceSettings(Section):
    """A search space in place of the packaged one, with the same content as a file in search_spaces/."""

    coarse: dict[str, list[HyperValue]]
    """Axes of the coarse grid and their values."""
    fine: dict[str, list[HyperValue]] = {}
    """The same axes, closer to the expected winner; default: as coarse. `grid` uses it with `refine: table`; strategies
    that sample use the range of both grids."""
    scale: dict[str, str] = {}
    """Scale of each axis: log, linear or complement."""
    fixed: dict[str, HyperValue] = {}
    """Hyperparameters that are not tuned."""


class MethodSettings(Section):
    """A method, with the study's changes to its options and search space. A label names a variant of a method."""

    name: str
    """Name as listed by `fedsweep methods`."""
    label: str = Field(default="", max_length=60)
    """Name of this variant in tables."""
    rounds: int | None = Field(default=None, ge=1, le=10**6)
    """Rounds of all stages, instead of the study's."""
    clip: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Instead of the study's."""
    clipping: Clipping | None = None
    """Instead of the study's: a table can show a method with and without it."""
    preprocess: PreprocessSettings | None = None
    """Instead of the study's: a table can show a method with and without it."""
    aggregate: Aggregate | None = None
    """Instead of the study's."""
    precision: Precision | None = None
    """Instead of the study's."""
    model: ModelText | None = None
    """Instead of the study's: a table can show a head alone and with trained layers."""
    search_space: SpaceSettings | None = None
    """In place of the packaged one. A file named after the method, next to the study file, has the same effect."""
    fixed: dict[str, HyperValue] = {}
    """Hyperparameters set to a fixed value."""
    coarse: dict[str, list[HyperValue]] = {}
    """Axes of the coarse grid to replace or add."""
    fine: dict[str, list[HyperValue]] = {}
    """Axes of the fine grid to replace or add."""
    scale: dict[str, str] = {}
    """Scale of each axis: log, linear or complement."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and len(value) == 1 and "name" not in value:
            ((name, changes),) = value.items()
            if changes is not None and not isinstance(changes, dict):
                raise ValueError(f"the changes of {name} are {changes!r}, not a mapping")
            return {"name": name, **(changes or {})}
        if not isinstance(value, cls | dict) or (isinstance(value, dict) and "name" not in value):
            raise ValueError("it should be the name of a method, or one name with its changes")
        return value

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in METHODS:
            raise ValueError(f"method {name!r} is unknown; {choices(name, METHODS)}{LOAD_A_PLUGIN}")
        return name

    @model_validator(mode="after")
    def _space_is_valid(self) -> MethodSettings:
        try:
            space = self.space()
        except UserError as error:
            raise ValueError(str(error)) from None
        if "as_released" in {*space.coarse, *space.fine}:
            raise ValueError(f"as_released of {self.name} is not searched over; set it under fixed")
        for stage, axes in (("coarse", space.coarse), ("fine", space.fine)):
            if space.size(axes) > LARGEST_GRID:
                raise ValueError(
                    f"the {stage} grid of {self.name} has {space.size(axes)} configurations, more than {LARGEST_GRID}; "
                    "give shorter axes or fix some of them"
                )
        if self.rounds is not None and "rounds" in {*space.coarse, *space.fixed}:
            raise ValueError(f"rounds of {self.name} are both set and in its search space")
        if self.clip is not None and "clip" in {*space.coarse, *space.fixed}:
            raise ValueError(f"clip of {self.name} is both set and in its search space")
        return self

    def space(self) -> SearchSpace:
        own = self.search_space
        if own is not None:
            space = search_spaces.build(self.name, own.coarse, own.fine or own.coarse, own.scale, own.fixed)
        elif self.coarse and not search_spaces.is_packaged(self.name):
            space = search_spaces.build(self.name, {}, {}, {}, {})
        else:
            space = search_spaces.load(self.name)
        return space.with_overrides(fixed=self.fixed, coarse=self.coarse, fine=self.fine, scale=self.scale)

    @property
    def shown(self) -> str:
        """Name in tables: the label, or the method's title with its options. A method that runs as its authors released
        it, or in reduced precision, is always marked."""
        parts = [self.label, *self._precision] if self.label else [METHODS[self.name].title, *self.own_options]
        return f"{', '.join(parts)} (as released)" if self.as_released else ", ".join(parts)

    @property
    def own_options(self) -> list[str]:
        """Options that distinguish this variant of the method, in words. Those of `defaults: adaptive` are one word."""
        own = self.preprocess or PreprocessSettings()
        scaled = ["scaled"] if own.scale or own.length else []
        centred = [] if not own.center else ["auto-centred" if own.center == "auto" else "centred"]
        weighted = ["size-weighted"] if self.aggregate == "size" else []
        if weighted and own == ADAPTIVE:
            scaled, centred, weighted = ["adaptive"], [], []
        clipped = [f"{self.clipping} clipping"] if self.clipping in ("automatic", "adaptive") else []
        return [*scaled, *centred, *weighted, *clipped, *self._precision, *([self.model] if self.model else [])]

    @property
    def _precision(self) -> list[str]:
        return [str(self.precision)] if self.precision not in (None, "float32") else []

    @cached_property
    def as_released(self) -> bool:
        return self.space().fixed.get("as_released") is True

    @cached_property
    def id(self) -> str:
        """The method and its options, whatever its label: part of a cell's identity."""
        options = self.model_dump(mode="json", exclude={"name", "label"}, exclude_defaults=True)
        if not options:
            return self.name
        text = json.dumps(options, sort_keys=True, separators=(",", ":"))
        return f"{self.name}#{hashlib.sha256(text.encode()).hexdigest()[:12]}"
