"""The `seeds` section."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from orchestrator.section import Section


class SeedSettings(Section):
    """Seeds of each stage. Winners are chosen on other seeds than those that confirm them."""

    search: list[int] = Field(default=[1, 2, 3], min_length=1)
    """Seeds of every configuration in the search, which is ranked by its mean over them."""
    contest: list[int] = [11, 12, 13, 14, 15]
    """Fresh seeds on which the best configurations of a search are compared again; if empty, there is no contest."""
    confirm: list[int] = Field(default=[42, 123, 7, 99, 1000], min_length=1)
    """Seeds of the winners' final runs."""
    partition: int | list[int] | Literal["per-seed"] = 42
    """Seed of the partition: one for all runs; `per-seed`, each run's own seed; or a list, which the runs of a stage
    take in turn."""

    @field_validator("search", mode="before")
    @classmethod
    def _single_seed_as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) else value

    @field_validator("partition")
    @classmethod
    def _valid_partition_seeds(cls, value: int | list[int] | str) -> int | list[int] | str:
        seeds = value if isinstance(value, list) else [value] if isinstance(value, int) else []
        if value == [] or any(not 0 <= seed < 2**32 for seed in seeds) or len(set(seeds)) != len(seeds):
            raise ValueError(f"partition seeds {value} must be distinct, not negative and below 2^32")
        return value

    @field_validator("search", "contest", "confirm")
    @classmethod
    def _distinct(cls, seeds: list[int], info: ValidationInfo) -> list[int]:
        if seeds and (len(set(seeds)) != len(seeds) or min(seeds) < 0 or max(seeds) >= 2**63):
            raise ValueError(f"{info.field_name} seeds {seeds} must be distinct, not negative and below 2^63")
        return seeds

    @model_validator(mode="after")
    def _contest_uses_fresh_seeds(self) -> SeedSettings:
        both = sorted({*self.search} & {*self.contest})
        if both:
            raise ValueError(f"seed {both[0]} is both a search and a contest seed; a contest needs fresh ones")
        largest = max(*self.search, *self.contest, *self.confirm)
        if self.partition == "per-seed" and largest >= 2**32:
            raise ValueError(f"partition: per-seed needs seeds below 2^32, and {largest} is not")
        return self

    def partition_seed(self, seed: int, stage_seeds: Sequence[int]) -> int:
        """The partition's seed for the run with this seed. `stage_seeds`: all seeds of its stage."""
        if isinstance(self.partition, int):
            return self.partition
        if self.partition == "per-seed":
            return seed
        return self.partition[stage_seeds.index(seed) % len(self.partition)]
