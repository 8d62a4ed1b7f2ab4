"""From a table and its schema to the arrays of a feature file. Every row is converted by itself: nothing is fitted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainables.data.feature_file import CLIENT_COLUMN, LARGEST_FEATURE, TEST_CLIENT_COLUMN, check_expansion
from trainables.data.importing.reading import Table, as_text, first_index_of, is_svmlight, read_table
from trainables.data.importing.schema import Column, Schema, read_schema, scaled
from trainables.errors import UserError

MISSING = {"", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "?"}
"""Texts that stand for a missing number, in lower or upper case. In a column of categories only "" is missing."""
SHOWN = 20
"""Names of columns in a message."""
OUTWEIGHS = 10.0  # times the median column's standard deviation


@dataclass
class Converted:
    """A table as arrays of a feature file, and what its owner should know about it."""

    arrays: dict[str, NDArray]
    schema: Schema
    """The schema with its defaults filled in."""
    unused: list[str] = field(default_factory=list)
    """Columns of the table that are neither features nor have a role."""
    notes: list[str] = field(default_factory=list)
    """Values that were replaced or moved into their range, and other warnings."""


def schema_path(source: str) -> str:
    """Where the schema of a table is expected: visits.csv has visits.schema.yaml next to it."""
    folder, slash, name = source.rpartition("/")
    return f"{folder}{slash}{Path(name).stem if name else 'data'}.schema.yaml"


def load_table(source: str) -> Converted:
    """A table that has its schema next to it."""
    expected = schema_path(source)
    if "://" not in source and not Path(expected).is_file():
        raise UserError(
            f"data {source} is a table and needs a schema, {expected}; write a draft with: "
            f"fedsweep data import {shlex.quote(source)} --label COLUMN --draft-schema"
        )
    return convert_file(source, read_schema(expected))


def convert_file(source: str, schema: Schema) -> Converted:
    schema = with_default_roles(source, schema)
    if schema.first_index is not None and not is_svmlight(source):
        raise UserError(
            f"first_index = {schema.first_index} in the schema of {source}: only SVMlight files have indices"
        )
    table = read_table(source, roles_of(schema), _width(schema), schema.first_index)
    if is_svmlight(source) and schema.first_index is None:  # a file to predict may not use the first feature
        schema = schema.model_copy(update={"first_index": first_index_of(source)})
    return convert(source, table, schema)


def with_default_roles(source: str, schema: Schema) -> Schema:
    """Fill in the columns whose names are fixed: the label of an SVMlight file; label, split and client of arrays
    with the names of a feature file (x_train). Raises if the label is still unknown."""
    if not schema.label and is_svmlight(source):
        return schema.model_copy(update={"label": "label"})
    if schema.label in ("", "y") and (Path(source).is_dir() or source.endswith(".npz")):
        table = read_table(source)
        if set(table) >= {"x", "y", "split"}:
            client = schema.client or ("client" if "client" in table else "")
            return schema.model_copy(update={"label": "y", "split": schema.split or "split", "client": client})
    if not schema.label:
        raise UserError(f"data {source}: which column is the label? Name it with --label, or in the schema")
    return schema


def roles_of(schema: Schema) -> list[str]:
    return [schema.label, schema.client, schema.split]


def _width(schema: Schema) -> int | None:
    """The declared number of features of an SVMlight file or a bare array, whose columns form one array `features`."""
    column = (schema.columns or {}).get("features")
    return column.width if column is not None else None


def convert(source: str, table: Table, schema: Schema) -> Converted:
    for name in filter(None, roles_of(schema)):
        column_of(source, table, name)
    found = Converted({}, schema)
    columns = _columns(source, table, schema, found)
    x = _features(source, table, columns, found.notes)
    _note_scales(x, table, columns, found.notes)
    rows = assign_rows(source, table, schema, found.notes)
    widths = {
        name: column.model_copy(update={"width": table[name].shape[1]}) if table[name].ndim == 2 else column
        for name, column in columns.items()
    }
    found.schema = schema.model_copy(update={"columns": widths, "classes": rows.classes})
    found.arrays = {
        "x_train": x[~rows.test],
        "x_test": x[rows.test],
        **rows.arrays,
        "schema": np.array(found.schema.for_prediction.to_json()),
    }
    return found


@dataclass(frozen=True)
class Assignment:
    """The labels and clients of a table, and its test rows."""

    test: NDArray[np.bool_]
    classes: tuple[str, ...]
    arrays: dict[str, NDArray]
    """The arrays of the feature file other than the features."""


def assign_rows(source: str, table: Table, schema: Schema, notes: list[str]) -> Assignment:
    labels = texts_of(source, table, schema.label, "label")
    classes = schema.classes or in_order(labels)
    if len(classes) < 2:
        raise UserError(
            f"data {source}: every row has the label {classes[0]!r}; if there are other classes, name them in a schema"
        )
    y = _numbered(source, labels, classes)
    clients = _clients(source, table, schema)
    test = _test_rows(source, table, schema, clients)
    if test.all() or not test.any():
        raise UserError(f"data {source} has no {'train' if test.all() else 'test'} rows")
    arrays = {"y_train": y[~test], "y_test": y[test], "class_names": np.array(classes, dtype=str)}
    if clients is not None:
        names, numbers = np.unique(clients[~test], return_inverse=True)
        if "" in names:
            row = int(np.flatnonzero((clients == "") & ~test)[0]) + 1
            raise UserError(f"data {source}: column {schema.client!r} names no client in row {row}")
        arrays |= {CLIENT_COLUMN: numbers.astype(np.int64), "client_names": names}
        known = np.isin(clients[test], names)
        if known.all():
            arrays[TEST_CLIENT_COLUMN] = np.searchsorted(names, clients[test]).astype(np.int64)
        elif (clients[test] != "").all():
            notes.append(f"{(~known).sum()} test rows belong to clients without train rows: metrics by client "
                               "are not available")  # fmt: skip
    return Assignment(test, classes, arrays)


def convert_new_rows(source: str, schema: Schema) -> tuple[NDArray[np.float32], NDArray | None, list[str]]:
    """Rows to predict, as features, the names of their classes if the table has them, and notes."""
    table = read_table(source, [schema.label] if source.endswith(".npy") else (), _width(schema), schema.first_index)
    found = Converted({}, schema)
    x = _features(source, table, _columns(source, table, schema, found), found.notes)
    labels = texts_of(source, table, schema.label, "label", required=False) if schema.label in table else None
    return x, labels, found.notes


# ---- features


def column_of(source: str, table: Table, name: str) -> NDArray:
    _check_columns(source, table, [name])
    return table[name]


def _check_columns(source: str, table: Table, names: Iterable[str]) -> None:
    if missing := [repr(name) for name in names if name not in table]:
        plural = "s" if len(missing) > 1 else ""
        raise UserError(
            f"data {source} has no column{plural} {', '.join(missing[:SHOWN])}; "
            f"it has: {', '.join(map(repr, list(table)[:SHOWN]))}"
        )


def _columns(source: str, table: Table, schema: Schema, found: Converted) -> dict[str, Column]:
    """The columns that become features. Writes the names of the others to `found.unused`."""
    others = [name for name in table if name not in roles_of(schema)]
    if schema.columns is None:
        found.unused = [name for name in others if names_an_index(name)]
        features = [name for name in others if name not in found.unused]
        if not features:
            raise UserError(f"data {source} has no column that could be a feature")
        return dict.fromkeys(features, Column())
    _check_columns(source, table, schema.columns)
    found.unused = [name for name in others if name not in schema.columns]
    return dict(schema.columns)


def names_an_index(name: str) -> bool:
    """Whether it is the name that pandas gives to an index, or to a column without a name."""
    return re.fullmatch(r"Unnamed: \d+|__index_level_\d+__", name) is not None


def _width_of(values: NDArray, column: Column) -> int:
    """The number of features that a column becomes."""
    return len(column.categories or ()) or values.size // len(values)


def _features(source: str, table: Table, columns: dict[str, Column], notes: list[str]) -> NDArray[np.float32]:
    widths = [_width_of(table[name], column) for name, column in columns.items()]
    given = sum(table[name].nbytes for name in columns)
    check_expansion(source, "the table of its features", 4 * sum(widths) * len(table[next(iter(columns))]), given)
    parts, incomplete = [], {}
    for name, column in columns.items():
        convert = _scaled_numbers if column.categories is None else _categories
        try:
            parts.append(convert(source, table[name], name, column, notes))
        except _MissingValuesError as error:
            incomplete[name] = error
    if incomplete:
        raise UserError(_missing_text(source, columns, incomplete))
    return np.concatenate(parts, axis=1)


class _MissingValuesError(Exception):
    """A column has no value in `count` rows, first in row `row`, and its schema declares no replacement."""

    def __init__(self, missing: NDArray[np.bool_]) -> None:
        self.count, self.row = int(missing.sum()), _first_row(missing)


def _missing_text(source: str, columns: dict[str, Column], incomplete: dict[str, _MissingValuesError]) -> str:
    (first, error), *others = incomplete.items()
    kind = "NUMBER" if columns[first].categories is None else "CATEGORY"
    where = f"column {first!r} has no value in row {error.row}"
    if others:
        shown = ", ".join(f"{name!r} ({one.count})" for name, one in [(first, error), *others][:SHOWN])
        more = f" and {len(incomplete) - SHOWN} more" if len(incomplete) > SHOWN else ""
        where = f"{len(incomplete)} columns have missing values: {shown}{more}"
    return (
        f"data {source}: {where}; declare what replaces missing values in a schema ({first}: {{missing: {kind}}}), "
        "or leave these rows out"
    )


def _note_scales(x: NDArray[np.float32], table: Table, columns: dict[str, Column], notes: list[str]) -> None:
    """Add a note if one column varies far more than the others. Training scales whole rows, not columns, so such a
    column would outweigh the others."""
    spreads = x.std(axis=0, dtype=np.float64)
    names = [name for name, column in columns.items() for _ in range(_width_of(table[name], column))]
    varying = spreads[spreads > 0]
    largest = int(np.argmax(spreads))
    if len(varying) > 1 and spreads[largest] > OUTWEIGHS * np.median(varying) and columns[names[largest]].range is None:
        times = spreads[largest] / np.median(varying)
        notes.append(
            f"values of column {names[largest]!r} vary {times:.0f} times as much as those of the median column, and "
            "will outweigh them: declare the ranges of columns in a schema (--draft-schema writes one)"
        )


def _scaled_numbers(source: str, values: NDArray, name: str, column: Column, notes: list[str]) -> NDArray[np.float32]:
    numbers = _numbers(source, values, name)
    if numbers.ndim == 2 and column.width is not None and numbers.shape[1] != column.width:
        raise UserError(f"data {source}: {name!r} has {numbers.shape[1]} columns, its schema declares {column.width}")
    missing = np.isnan(numbers)
    if missing.any():
        if column.missing is None:
            raise _MissingValuesError(missing)
        numbers = np.where(missing, float(column.missing), numbers)
        notes.append(f"column {name!r}: {missing.sum()} missing, replaced by {column.missing:g}")
    if np.isinf(numbers).any():
        raise UserError(f"data {source}: column {name!r} has an infinite value in row {_first_row(np.isinf(numbers))}")
    if column.range is not None:
        outside = int(((numbers < column.range[0]) | (numbers > column.range[1])).sum())
        if outside:
            low, high = column.range
            what, moved = (f"{outside} values", "were") if outside > 1 else ("1 value", "was")
            notes.append(f"column {name!r}: {what} outside {low:g} to {high:g} {moved} moved to the nearer end")
    features = scaled(numbers, column)
    if (beyond := np.abs(features) > LARGEST_FEATURE).any():
        where = f"column {name!r} has a value beyond ±{LARGEST_FEATURE:g} in row {_first_row(beyond)}"
        raise UserError(f"data {source}: {where}; declare its range in a schema")
    features = features.astype(np.float32)
    return features if features.ndim == 2 else features[:, None]


def _first_row(wrong: NDArray[np.bool_]) -> int:
    """The first row with a wrong value, counted from 1 without the header."""
    rows = wrong if wrong.ndim == 1 else wrong.any(axis=1)
    return int(np.flatnonzero(rows)[0]) + 1


def _numbers(source: str, values: NDArray, name: str) -> NDArray[np.float64]:
    if values.dtype.kind != "U":
        return values.astype(np.float64)
    import pandas as pd

    numbers = pd.to_numeric(pd.Series(values.ravel()), errors="coerce").to_numpy(np.float64)
    wrong = np.isnan(numbers) & ~np.isin(np.char.lower(values.ravel()), list(MISSING))
    if wrong.any():
        value, row = str(values.ravel()[wrong][0]), _first_row(wrong.reshape(values.shape))
        raise UserError(
            f"data {source}: column {name!r} holds text, {value!r} in row {row}, not a number; declare its categories "
            "in a schema, or leave it out (--draft-schema writes a schema)"
        )
    return numbers.reshape(values.shape)


def _categories(source: str, values: NDArray, name: str, column: Column, notes: list[str]) -> NDArray[np.float32]:
    assert column.categories is not None
    if values.ndim != 1:
        raise UserError(f"data {source}: {name!r} has several numbers per row, and categories need one value")
    texts = as_texts(values)
    missing = (texts == "") & ("" not in column.categories)
    if missing.any():
        if column.missing is None:
            raise _MissingValuesError(missing)
        texts = np.where(missing, as_text(column.missing), texts)
        notes.append(f"column {name!r}: {missing.sum()} missing, replaced by {as_text(column.missing)!r}")
    known = np.array(column.categories, dtype=str)
    unknown = ~np.isin(texts, known)
    if unknown.any():
        raise UserError(
            f"data {source}: {str(texts[unknown][0])!r} in row {_first_row(unknown)} is not a declared category of "
            f"column {name!r}"
        )
    return (texts[:, None] == known[None, :]).astype(np.float32)


def as_texts(values: NDArray) -> NDArray:
    """The values as text; "" for nan."""
    if values.dtype.kind == "U":
        return values
    return np.array(["" if value != value else as_text(value) for value in values.tolist()], dtype=str)


# ---- labels, clients, test rows


def texts_of(source: str, table: Table, name: str, role: str, *, required: bool = True) -> NDArray:
    """A column as text. `role`: what error messages call the column. `required`: missing values are refused."""
    values = table[name]
    if values.ndim != 1:
        raise UserError(f"data {source}: {name!r} has several numbers per row and cannot be the {role}")
    texts = as_texts(values)
    if required and (texts == "").any():
        raise UserError(f"data {source}: the {role} {name!r} is missing in row {_first_row(texts == '')}")
    return texts


def in_order(labels: NDArray) -> tuple[str, ...]:
    """The distinct labels: numbers by their value, texts by the alphabet."""
    distinct = [str(label) for label in np.unique(labels)]
    try:
        return tuple(sorted(distinct, key=float))
    except ValueError:
        return tuple(distinct)


def _numbered(source: str, labels: NDArray, classes: Sequence[str]) -> NDArray[np.int64]:
    distinct, inverse = np.unique(labels, return_inverse=True)
    known = {name: number for number, name in enumerate(classes)}
    for label in distinct:
        if str(label) not in known:
            row = _first_row(labels == label)
            raise UserError(f"data {source}: label {str(label)!r} in row {row} is not a declared class")
    return np.array([known[str(label)] for label in distinct], dtype=np.int64)[inverse]


def _clients(source: str, table: Table, schema: Schema) -> NDArray | None:
    if not schema.client:
        return None
    return texts_of(source, table, schema.client, "client", required=False)


def _test_rows(source: str, table: Table, schema: Schema, clients: NDArray | None) -> NDArray[np.bool_]:
    """A mask of the test rows. The split column states them. Without this column they are drawn by row number, and
    every client keeps at least one train row."""
    if schema.split:
        texts = np.char.lower(texts_of(source, table, schema.split, "split"))
        wrong = ~np.isin(texts, ["train", "test"])
        if wrong.any():
            raise UserError(
                f"data {source}: {str(texts[wrong][0])!r} in column {schema.split!r}, row {_first_row(wrong)}, is "
                "neither train nor test"
            )
        return texts == "test"
    rows = len(table[schema.label])
    wanted = max(1, round(schema.test_fraction * rows))
    order = np.random.Generator(np.random.Philox(key=schema.seed)).permutation(rows)
    test = np.zeros(rows, dtype=bool)
    if clients is None:
        test[order[:wanted]] = True
        return test
    _, numbers, left = np.unique(clients, return_inverse=True, return_counts=True)
    for row in order:
        if wanted and left[numbers[row]] > 1:
            test[row] = True
            left[numbers[row]] -= 1
            wanted -= 1
    return test
