"""Writes a draft of a schema. Its values come from the data, so its comments tell the user what to check."""

from __future__ import annotations

import json
import math
import re

import numpy as np
from numpy.typing import NDArray

from trainables.data.importing.conversion import MISSING, as_texts, in_order, names_an_index, texts_of
from trainables.data.importing.reading import Table
from trainables.data.importing.schema import Schema

MOST_CATEGORIES = 50  # a text column with more values is probably an id or free text
FEWEST_NUMBERED = 20  # in fewer rows, a column of distinct consecutive numbers may be chance
NUMBER_LIKE = r"[-+]?\D?\d[\d.,' ]*\D?"
"""Numbers as people write them: 1,234.50, 1.234,5, $5, 40%."""
NAMES_OF_NUMBERS = ("", "id", "index", "row", "rownames", "rowid")
"""Names, in lower case, of columns that number the rows even if some numbers are missing."""

HEADER = """\
# Schema of {source}: a draft to check.
# A schema is not protected: everything in it must be public knowledge, known without looking at the records. The draft
# did look at them. Replace every value that you know only from the data, or take the column out.
"""


def draft(source: str, table: Table, schema: Schema) -> str:
    """The text of a schema file."""
    labels = texts_of(source, table, schema.label, "label")
    lines = [
        HEADER.format(source=_yaml(source)).rstrip(),
        f"label: {_yaml(schema.label)}",
    ]
    lines += [f"classes: {_yaml(list(schema.classes or in_order(labels)))}  # all classes, also those without a row"]
    if schema.client:
        lines.append(f"client: {_yaml(schema.client)}")
    if schema.split:
        lines.append(f"split: {_yaml(schema.split)}")
    else:
        lines.append(f"test_fraction: {schema.test_fraction:g}")
    lines.append("columns:")
    roles = (schema.label, schema.client, schema.split)
    for name in table:
        if name not in roles:
            lines += [f"  {line}" for line in _column(name, table[name])]
    return "\n".join(lines) + "\n"


def _column(name: str, values: NDArray) -> list[str]:
    if names_an_index(name):
        return [f"# {_yaml(name)}: left out"]
    if values.ndim == 2:
        low, high = _limits(values)
        shown = f"range: [{low:g}, {high:g}], width: {values.shape[1]}"
        lines = [f"{_yaml(name)}: {{{shown}}}  # which range is possible?"]
        return [*lines, *_missing(name, int(np.isnan(values).sum()), f"{shown}, missing: NUMBER")]
    if values.dtype.kind == "U":
        lowered = np.char.lower(values)
        missing = np.isin(lowered, list(MISSING))
        try:
            numbers = values[~missing].astype(np.float64)
        except ValueError:
            return _text_column(name, values)
    else:
        missing = np.isnan(values.astype(np.float64))
        numbers = values[~missing].astype(np.float64)
    low, high = _limits(numbers)
    if _numbers_the_rows(name, numbers, len(values)):
        return [f"# {_yaml(name)}: {{range: [{low:g}, {high:g}]}}  # left out: it identifies the row"]
    lines = [f"{_yaml(name)}: {{range: [{low:g}, {high:g}]}}  # which range is possible?"]
    return [*lines, *_missing(name, int(missing.sum()), f"range: [{low:g}, {high:g}], missing: NUMBER")]


def _numbers_the_rows(name: str, numbers: NDArray, rows: int) -> bool:
    if len(numbers) < FEWEST_NUMBERED or len(np.unique(numbers)) != rows or not np.isfinite(numbers).all():
        return False
    if (numbers % 1 != 0).any():
        return False
    return name.lower() in NAMES_OF_NUMBERS or bool(numbers.max() - numbers.min() + 1 == rows)


def _text_column(name: str, values: NDArray) -> list[str]:
    texts = as_texts(values)
    categories = sorted({str(text) for text in texts} - {""})
    numbers = sum(re.fullmatch(NUMBER_LIKE, text) is not None for text in categories) > len(categories) / 2
    if len(categories) > MOST_CATEGORIES:
        looks = "; if they are numbers, write them like 1234.5" if numbers else ""
        return [f"# {_yaml(name)}: left out, {len(categories)} different texts{looks}"]
    shown = f"categories: {_yaml(categories)}"
    question = "numbers? then write them like 1234.5 in the table" if numbers else "which values are possible?"
    lines = [f"{_yaml(name)}: {{{shown}}}  # {question}"]
    return [*lines, *_missing(name, int((texts == "").sum()), f"{shown}, missing: CATEGORY")]


def _missing(name: str, count: int, with_constant: str) -> list[str]:
    if not count:
        return []
    return [f"# {count} values of {_yaml(name)} are missing, and are refused unless a constant replaces them:",
            f"# {_yaml(name)}: {{{with_constant}}}"]  # fmt: skip


def _limits(numbers: NDArray) -> tuple[float, float]:
    """Minimum and maximum, rounded outwards to two significant digits."""
    finite = numbers[np.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    unit = 10.0 ** (math.floor(math.log10(max(abs(low), abs(high), 1e-300))) - 1)
    low, high = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    return (low, high) if low < high else (low - 1, low + 1)


def _yaml(value: object) -> str:
    """A value as YAML. Texts that YAML might read as something else are quoted as in JSON."""
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    plain = isinstance(value, str) and value.isidentifier() and value.lower() not in RESERVED
    if plain:
        return str(value)
    # Unicode line breaks are escaped
    return json.dumps(value, ensure_ascii=isinstance(value, str) and not value.isprintable())


RESERVED = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
