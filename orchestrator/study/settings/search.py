"""The `search` section: strategies, selection rules and the strategies' own settings."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.search.strategies import STRATEGIES
from orchestrator.search.strategies.halving import HalvingSettings
from orchestrator.search.strategies.optuna import OptunaSettings
from orchestrator.search.strategies.private import PrivateSettings
from orchestrator.search.strategies.random import RandomSettings
from orchestrator.search.strategies.surface import SurfaceSettings
from orchestrator.search.variant import Select
from orchestrator.section import Section
from orchestrator.study.errors import invalid, message
from orchestrator.study.settings.method import LARGEST_GRID
from trainables.errors import LOAD_A_PLUGIN, choices


class SearchSettings(Section):
    """How configurations are proposed and winners are chosen."""

    model_config = ConfigDict(extra="allow")  # for the sections of plug-ins' strategies; others are refused below

    strategies: list[str] = Field(default=["grid"], min_length=1)
    """Search strategies: grid, optuna, random, halving, surface, private, or a plug-in's. Each searches every cell. The
    tables of a private search may be published."""
    select: list[Select] = Field(default=["contest"], min_length=1)
    """How the winner is chosen. contest: configurations are ranked by their mean over the search seeds, and the best
    are compared again on fresh seeds. single: the best on the first search seed wins, as in the papers."""
    finalists: int = Field(default=8, ge=1, le=1000)
    """How many configurations meet in a contest."""
    warm_start: bool = False
    """Whether the best configurations of the next smaller and the next larger budget join a cell's contest."""
    refine: Literal["table", "zoom"] = "zoom"
    """The fine grid: as the search space lists it (table), or around the coarse winner (zoom)."""
    trials: int | None = Field(default=None, ge=1, le=LARGEST_GRID)
    """Configurations that Optuna or a random search tries; the number whose rounds halving may use; the mean number of
    runs of a private search. By default the size of the coarse and the fine grid together. For surface: trials of the
    search per cell, by default 16 per axis, or 64 per axis over all budgets if there are fewer than four."""
    optuna: OptunaSettings = OptunaSettings()
    random: RandomSettings = RandomSettings()
    halving: HalvingSettings = HalvingSettings()
    private: PrivateSettings = PrivateSettings()
    surface: SurfaceSettings = SurfaceSettings()

    @model_validator(mode="before")
    @classmethod
    def _plugin_sections(cls, value: Any) -> Any:
        """Check the sections of plug-ins' strategies, and refuse other unknown keys."""
        if not isinstance(value, dict):
            return value
        sections = {}
        for name in value.keys() - cls.model_fields.keys():
            if name not in STRATEGIES:
                raise PydanticCustomError(
                    "unknown_section",
                    ", and no strategy of this name; --import MODULE loads a plug-in's",
                    {"at": (str(name),)},
                )
            settings = STRATEGIES[name].Settings
            try:
                sections[name] = settings.model_validate(value[name])
            except ValidationError as error:
                first = error.errors()[0]
                if first["type"] == "extra_forbidden":
                    sentence = f"there is no such setting; {name} has: {', '.join(settings.model_fields) or 'none'}"
                else:
                    sentence = message([e for e in error.errors() if e["loc"] == first["loc"]])
                raise invalid(sentence, name, *first["loc"]) from None
        return {**value, **sections}

    @field_validator("select", mode="before")
    @classmethod
    def _single_rule_as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("strategies")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in STRATEGIES:
                raise ValueError(f"strategy {name!r} is unknown; {choices(name, STRATEGIES)}{LOAD_A_PLUGIN}")
        return names

    @field_validator("strategies", "select")
    @classmethod
    def _distinct(cls, names: list[str], info: ValidationInfo) -> list[str]:
        if len(set(names)) != len(names):
            raise ValueError(f"{info.field_name} {names} names one twice")
        return names

    @model_validator(mode="after")
    def _warm_start_needs_a_contest(self) -> SearchSettings:
        if self.warm_start and ("contest" not in self.select or self.publishes_only_winners):
            raise invalid("warm_start brings more finalists to a contest, and there is none", "warm_start")
        return self

    @model_validator(mode="after")
    def _private_excludes_others(self) -> SearchSettings:
        if self.publishes_only_winners and len(self.strategies) > 1:
            hiding = next(name for name in self.strategies if STRATEGIES[name].publishes_only_winner)
            raise invalid(f"strategies = {self.strategies}: the others would show what {hiding} hides", "strategies")
        return self

    @property
    def publishes_only_winners(self) -> bool:
        return any(STRATEGIES[name].publishes_only_winner for name in self.strategies)

    def section(self, strategy: str) -> Section:
        """The settings of a strategy."""
        given = getattr(self, strategy, None)
        return given if isinstance(given, Section) else STRATEGIES[strategy].Settings()
