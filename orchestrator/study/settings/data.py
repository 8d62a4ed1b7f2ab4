"""The `data` section: the data sets of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from orchestrator.section import Section
from trainables.data.importing.reading import is_table
from trainables.urls import shown_url


class DataSettings(Section):
    """A data set: a feature file or a table (relative to the study file) or a built-in one, and its name in tables."""

    source: str
    """A feature file, a table with its schema next to it, or the name of a built-in, simulated or plug-in's data
    set."""
    label: str = Field(default="", max_length=60)
    """Name in tables."""
    backbone: str = Field(default="", max_length=60)
    """The network that computed the features, for tables."""
    records: str = Field(default="", max_length=60)
    """Name of the records. Files prepared from the same records, for example through different backbones, share it, so
    that the cost of everything published about them is added up."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, cls | str | dict):
            raise ValueError("it should be a feature file or a generated set, or a mapping with its source")
        return {"source": value} if isinstance(value, str) else value

    @property
    def id(self) -> str:
        """Part of a cell's identity: the name of the file without its folder, which may move, or the source."""
        source = shown_url(self.source)
        return Path(source).stem if self.is_file else source

    @property
    def is_file(self) -> bool:
        source = shown_url(self.source)
        return source.endswith(".npz") or is_table(source)

    @property
    def shown(self) -> str:
        """Name in tables."""
        return " ".join(part for part in (self.label or self.id, self.backbone) if part)
