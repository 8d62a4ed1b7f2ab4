"""The schema of a table: which column is the label, and how every other column becomes features.

All of it must be public knowledge. Nothing is fitted to the data: ranges, categories and replacements are declared.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from trainables.data.importing.reading import as_text
from trainables.data.stored import open_file
from trainables.errors import UserError
from trainables.limited_yaml import line_of, read_yaml

MOST_CATEGORIES = 10_000
LARGEST_SCHEMA = 1 << 22  # bytes


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _text(value: Any) -> Any:
    """Convert numbers to text, and refuse booleans: YAML reads 1 as a number, and yes as true."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is read as true or false; write it in quotes")
    return str(value) if isinstance(value, int | float) else value


def _texts(value: Any) -> Any:
    return [_text(item) for item in value] if isinstance(value, list | tuple) else value


Text = Annotated[str, BeforeValidator(_text)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]


class Column(_Part):
    """A column, or an array of several. Numbers without a range are left as they are."""

    range: tuple[float, float] | None = None
    """Numbers from here to there become -1 to 1; values outside are moved to the nearer end."""
    categories: Texts | None = Field(default=None, min_length=1, max_length=MOST_CATEGORIES)
    """Each becomes a feature that is 1 in rows with this value and 0 in the others."""
    missing: float | str | None = None
    """Replaces missing values. Without it they are refused."""
    width: int | None = Field(default=None, ge=1)
    """Number of features of an array or of a sparse table; default: as many as the file has."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Column:
        if self.categories is not None:
            if self.range is not None:
                raise ValueError("a column has a range or categories, not both")
            if len(set(self.categories)) != len(self.categories):
                raise ValueError("a category is named twice")
            if self.missing is not None and as_text(self.missing) not in self.categories:
                raise ValueError(f"missing = {self.missing!r} is none of the categories")
        elif isinstance(self.missing, str):
            raise ValueError(f"missing = {self.missing!r} is not a number")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(f"range = {list(self.range)}: the first number must be less than the second")
        if self.range is not None and math.isinf(self.range[1] - self.range[0]):
            raise ValueError(f"range = {list(self.range)} is too large for float64")
        return self


class Schema(_Part):
    label: Text = ""
    """The column with the classes."""
    classes: Texts | None = Field(default=None, min_length=2)
    """The classes in order; default: those in the file, whose names are then public."""
    client: Text = ""
    """The column that names the client of a row; "": the data names no clients."""
    split: Text = ""
    """The column that says train or test; "": test rows are drawn."""
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Share of the rows that is drawn as test rows."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """Seed of that draw."""
    first_index: Literal[0, 1] | None = None
    """Index of the first feature in an SVMlight file; default: 0 if the file uses it, else 1."""
    columns: dict[str, Column] | None = Field(default=None, min_length=1)
    """The columns that become features, in this order; default: all others, which must be numbers."""

    @field_validator("columns", mode="before")
    @classmethod
    def _column_names_are_text(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {_text(name): {} if column is None else column for name, column in value.items()}

    @model_validator(mode="after")
    def _is_consistent(self) -> Schema:
        if self.classes is not None and len(set(self.classes)) != len(self.classes):
            raise ValueError("a class is named twice")
        for role in ("label", "client", "split"):
            name = getattr(self, role)
            if name and self.columns is not None and name in self.columns:
                raise ValueError(f"column {name!r} is the {role} and cannot be a feature")
        return self

    @property
    def for_prediction(self) -> Schema:
        """What is needed to convert new rows."""
        return Schema(label=self.label, classes=self.classes, columns=self.columns, first_index=self.first_index)

    def to_json(self) -> str:
        return self.model_dump_json(exclude_defaults=True)


def read_schema(source: str) -> Schema:
    """From a YAML file or URL; errors name the line."""
    try:
        with open_file(source) as file:
            content = file.read(LARGEST_SCHEMA + 1)
        if len(content) > LARGEST_SCHEMA:
            raise UserError(f"schema {source} is larger than {LARGEST_SCHEMA >> 20} MiB")
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"schema {source} cannot be read: {reason}") from None
    values, marks = read_yaml(text, source)
    if not isinstance(values, dict):
        raise UserError(f"{source}: a schema is a mapping, this is {type(values).__name__}")
    try:
        return Schema.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = tuple(part for part in first["loc"] if part not in ("float", "str"))
        reason = first["msg"].removeprefix("Value error, ").replace("Input should", "it should", 1)
        if first["type"] == "extra_forbidden":
            reason = "there is no such setting"
        where = f"{'.'.join(map(str, place))}: " if place else ""
        raise UserError(f"{source}:{line_of(marks, place)}: {where}{reason}") from None


def schema_from_json(data: str, text: str) -> Schema:
    """From the text in a feature file or a saved model."""
    try:
        return Schema.model_validate_json(text)
    except ValidationError as error:
        raise UserError(f"data {data}: its schema is damaged: {error.errors()[0]['msg']}") from None


def scaled(values: Any, column: Column) -> Any:
    """Map the declared range to -1 to 1; numbers outside are clipped. Without a range, values are unchanged."""
    if column.range is None:
        return values
    low, high = column.range
    return (values.clip(low, high) - low) * (2 / (high - low)) - 1
