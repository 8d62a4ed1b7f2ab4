"""Reads tables: CSV, Parquet, JSON lines, NumPy arrays and SVMlight, as columns by name. Nothing is unpickled.

A column is an array of numbers, one of text ("" where a value is missing), or an array of numbers with several features
per row.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trainables.data.feature_file import ARRAYS, CLIENT_COLUMN, READ_ERRORS, TEST_CLIENT_COLUMN, check_expansion
from trainables.data.importing.csv_table import read_csv, stripped
from trainables.data.importing.svmlight import first_index, read_svmlight
from trainables.data.names import check_text
from trainables.data.stored import open_file
from trainables.errors import UserError

Table = dict[str, NDArray]
PARQUET_ROWS = 4096  # read at once
OBJECT_BYTES = 32  # of a number as a Python object in a list
SUFFIXES = {
    **dict.fromkeys((".csv", ".tsv"), "CSV"),
    **dict.fromkeys((".parquet", ".pq"), "Parquet"),
    **dict.fromkeys((".jsonl", ".ndjson"), "JSON lines"),
    **dict.fromkeys((".svm", ".svmlight", ".libsvm"), "SVMlight"),
    ".npy": "NumPy",
}
"""Kinds of tables by the end of the name. npz archives and folders of .npy files can be imported, too."""


@dataclass
class _Memory:
    """Counts the memory that a table takes. Repeated values, missing values and the padding of short texts take memory,
    but no space in a file."""

    source: str
    size: int
    """Bytes of the file."""
    used: int = 0

    def add(self, count: int) -> None:
        """Raises an error if the total is far more than the file's size."""
        self.used += count
        check_expansion(self.source, "its table", self.used, self.size)


def is_table(source: str) -> bool:
    """Whether this is the name of a table, which a study may use if it has a schema next to it."""
    return Path(source).suffix.lower() in SUFFIXES


def is_svmlight(source: str) -> bool:
    return SUFFIXES.get(Path(source).suffix.lower()) == "SVMlight"


def read_table(source: str, roles: Sequence[str] = (), width: int | None = None, first: int | None = None) -> Table:
    """`roles`: the columns of the label, the client and the split; for a bare array, their numbers.
    `width`, `first`: the number of features of an SVMlight file, and the index of the first one."""
    suffix = Path(source).suffix.lower()
    if "://" not in source and Path(source).is_dir():
        return _of_arrays(source, _folder(source))
    kind = SUFFIXES.get(suffix, "npz" if suffix == ".npz" else "")
    if not kind:
        known = ", ".join([*SUFFIXES, ".npz"])
        raise UserError(f"data {source} is of an unknown kind; the name of a table ends in one of: {known}")
    try:
        with open_file(source) as file:
            table = _read(source, kind, file, roles, width, first)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"data {source} does not exist") from None
    except UnicodeDecodeError:
        raise UserError(f"data {source} is not UTF-8 text") from None
    except (*READ_ERRORS, ValueError, OverflowError, csv.Error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"data {source} cannot be read as {kind}: {reason}") from None
    if not table or 0 in {len(column) for column in table.values()}:
        raise UserError(f"data {source} has no rows")
    return table


def first_index_of(source: str) -> int:
    """The index of the first feature of an SVMlight file."""
    with open_file(source) as file:
        return first_index(io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline=""))


def _read(source: str, kind: str, file: IO[bytes], roles: Sequence[str], width: int | None, first: int | None) -> Table:
    memory = _Memory(source, file.seek(0, io.SEEK_END))
    file.seek(0)
    if kind == "Parquet":
        return _parquet(source, file, memory)
    if kind == "npz":
        with np.load(file, allow_pickle=False) as archive:
            for info in archive.zip.infolist():
                memory.add(info.file_size)
            return _of_arrays(source, {name: _loaded(source, name, archive) for name in archive.files})
    if kind == "NumPy":
        return _bare_array(source, _checked(source, Path(source).stem, np.load(file, allow_pickle=False)), roles)
    lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    if kind == "SVMlight":
        return read_svmlight(source, lines, memory.add, width, first)
    return read_csv(source, lines, memory.add) if kind == "CSV" else _json_lines(source, lines, memory)


# ---- text


def _json_lines(source: str, lines: io.TextIOWrapper, memory: _Memory) -> Table:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"data {source}: line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"data {source}: line {number} is not a JSON object")
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    check_text(f"data {source}", names)
    memory.add(8 * len(rows) * len(names))
    return {name: _column(source, name, [row.get(name) for row in rows], memory) for name in names}


# ---- columns of Python values


def read_parquet(source: str, file: IO[bytes]) -> Any:
    """A `pyarrow.Table` without metadata; dictionary-encoded columns are decoded."""
    import pyarrow as pa
    import pyarrow.parquet

    memory = _Memory(source, file.seek(0, io.SEEK_END))
    try:
        content = pyarrow.parquet.ParquetFile(file)
        # column metadata is not read: if it is damaged, pyarrow crashes the process
        memory.add(8 * content.metadata.num_rows * content.metadata.num_columns)
        for field in content.schema_arrow:
            if pa.types.is_nested(field.type) and not _is_list_of_numbers(field.type):
                raise UserError(f"data {source}: column {field.name!r} holds nested values")
        batches = []
        for batch in content.iter_batches(PARQUET_ROWS):  # stops early if repeated values expand to too much memory
            columns = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in batch.columns]
            batches.append(pa.RecordBatch.from_arrays(columns, batch.schema.names))
            memory.add(batches[-1].nbytes)
            memory.add(OBJECT_BYTES * sum(len(c.flatten()) for c in columns if pa.types.is_nested(c.type)))
        return pa.Table.from_batches(batches) if batches else pa.table({})
    except pa.ArrowException as error:
        reason = " ".join(str(error).split())
        raise UserError(f"data {source} cannot be read as Parquet: {reason}") from None


def _parquet(source: str, file: IO[bytes], memory: _Memory) -> Table:
    import pyarrow as pa

    table = read_parquet(source, file)
    memory.add(table.nbytes)
    found: Table = {}
    for name in table.column_names:
        column = table[name]
        plain = pa.types.is_floating(column.type) or (pa.types.is_integer(column.type) and not column.null_count)
        found[name] = column.to_numpy() if plain else _column(source, name, column.to_pylist(), memory)
    return found


def _is_list_of_numbers(kind: Any) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and pa.types.is_primitive(kind.value_type)


def _column(source: str, name: str, values: Sequence[Any], memory: _Memory) -> NDArray:
    """Lists of numbers become an array with several features per row; None is missing."""
    present = [value for value in values if value is not None]
    if present and all(isinstance(value, list | tuple | np.ndarray) for value in present):
        if len(present) < len(values) or len({len(value) for value in present}) != 1:
            raise UserError(f"data {source}: in column {name!r}, lists are missing or differ in length")
        return _checked(source, name, np.array(present))
    if all(isinstance(value, int | float) for value in present):  # also true and false
        return np.array([np.nan if value is None else float(value) for value in values])
    if any(isinstance(value, dict | list) for value in present):
        raise UserError(f"data {source}: column {name!r} holds nested values")
    return stripped(source, ["" if value is None else as_text(value) for value in values], memory.add)


def as_text(value: Any) -> str:
    """A value as text. A float without a fraction becomes an integer: Parquet and NumPy may hold ids as floats."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, float | np.floating):
        return f"{float(value):.15g}"
    return str(value)


# ---- NumPy


def _folder(source: str) -> dict[str, NDArray]:
    arrays = {}
    for path in sorted(Path(source).glob("*.npy")):
        try:
            with open_file(str(path)) as file:
                arrays[path.stem] = _checked(source, path.stem, np.load(file, allow_pickle=False))
        except (*READ_ERRORS, ValueError) as error:
            raise _bad_array(source, path.stem, error) from None
    if not arrays:
        raise UserError(f"data {source} is a folder without .npy files")
    return arrays


def _loaded(source: str, name: str, archive: Any) -> NDArray:
    try:
        return _checked(source, name, archive[name])
    except ValueError as error:
        raise _bad_array(source, name, error) from None


def _bad_array(source: str, name: str, error: Exception) -> UserError:
    if "allow_pickle" in str(error):
        reason = "holds Python objects, which are never loaded; save text with dtype=str"
        return UserError(f"data {source}: {name} {reason}")
    return UserError(f"data {source}: {name} cannot be read: {error}")


def _checked(source: str, name: str, array: Any) -> NDArray:
    if (
        not isinstance(array, np.ndarray)
        or not array.dtype.itemsize
        or (array.dtype.kind not in "fiubU" and array.dtype.names is None)
    ):
        kind = getattr(array, "dtype", type(array).__name__)
        raise UserError(f"data {source}: {name} must hold numbers or text, but holds {kind}")
    return array


def _of_arrays(source: str, arrays: dict[str, NDArray]) -> Table:
    """A table from arrays with one row per example; arrays with 0 or more than 2 dimensions are left out. The four
    arrays of a feature file become one table with the column `split`."""
    if not set(ARRAYS) <= set(arrays):
        table = {name: array for name, array in arrays.items() if array.ndim in (1, 2)}
        lengths = {name: len(array) for name, array in table.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise UserError(
                f"data {source}: its arrays have different numbers of rows ({shown}); name train and test arrays "
                f"{', '.join(ARRAYS)}"
            )
        return table
    _check_rows(source, arrays)
    train, test = len(arrays["x_train"]), len(arrays["x_test"])
    try:
        table = {name: np.concatenate([arrays[f"{name}_train"], arrays[f"{name}_test"]]) for name in ("x", "y")}
    except ValueError as error:
        raise UserError(f"data {source}: its train and test arrays do not fit together: {error}") from None
    table["split"] = np.array(["train"] * train + ["test"] * test)
    if CLIENT_COLUMN in arrays:
        of_test = arrays[TEST_CLIENT_COLUMN].tolist() if TEST_CLIENT_COLUMN in arrays else [""] * test
        table["client"] = np.array([as_text(value) for value in (*arrays[CLIENT_COLUMN].tolist(), *of_test)])
    return table


def _check_rows(source: str, arrays: dict[str, NDArray]) -> None:
    """Raise unless labels and clients have one value for each row of features."""
    for part in ("train", "test"):
        rows = len(arrays[f"x_{part}"])
        for name in (f"y_{part}", CLIENT_COLUMN if part == "train" else TEST_CLIENT_COLUMN):
            if name in arrays and len(arrays[name]) != rows:
                raise UserError(f"data {source}: x_{part} has {rows} rows, but {name} has {len(arrays[name])}")


def _bare_array(source: str, array: NDArray, roles: Sequence[str]) -> Table:
    """Columns with a role are named by their numbers, as in `roles`; the others become the array `features`. The
    columns of a structured array are its fields."""
    if array.dtype.names is not None:
        return {name: _checked(source, name, array[name]) for name in array.dtype.names}
    if array.ndim != 2:
        raise UserError(f"data {source} must be a table, rows x columns, but has the shape {array.shape}")
    width, single = array.shape[1], {}
    for role in filter(None, roles):
        if not role.lstrip("-").isdecimal() or not -width <= int(role) < width:
            raise UserError(f"data {source} has the columns 0 to {width - 1}, not {role!r}")
        single[role] = int(role) % width
    others = [index for index in range(width) if index not in single.values()]
    return {**{role: array[:, index] for role, index in single.items()}, "features": array[:, others]}
