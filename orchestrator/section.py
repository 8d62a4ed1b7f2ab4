"""The base class of all sections of a study file."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section is immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    @classmethod
    def of(cls, settings: Section) -> Self:
        """Narrow the type of `settings`, which must be an instance of this class."""
        assert isinstance(settings, cls)
        return settings
