"""Reads CSV files, row by row: a row that does not fit its header is an error, because its values may be those of other
columns."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from trainables.data.names import check_text
from trainables.errors import UserError

SEPARATORS = ",;\t|"
MOST_COLUMNS = 50_000  # each takes milliseconds
CHUNK = 4096  # rows that are held as Python objects
QUOTES = "a value that begins with a quotation mark must end with one"
LONGEST_VALUE = 2**31 - 1


def read_csv(source: str, lines: io.TextIOWrapper, add_memory: Callable[[int], None]) -> dict[str, NDArray]:
    """All values as text, without spaces around them: ids keep their leading zeros, and NA may be a category."""
    csv.field_size_limit(LONGEST_VALUE)  # of the whole process: a larger limit harms no other reader
    separator = _separator(*islice((line for line in lines if line.strip()), 2))
    lines.seek(0)
    rows = filter(None, csv.reader(lines, delimiter=separator, strict=True))  # without empty lines
    try:
        names = _names(source, next(rows, []))
    except csv.Error as error:
        raise UserError(f"data {source}: the header cannot be read: {error}; {QUOTES}") from None
    columns: list[list[NDArray]] = [[] for _ in names]
    checked = _checked(source, rows, len(names), separator)
    while chunk := list(islice(checked, CHUNK)):
        for column, values in zip(columns, zip(*chunk, strict=True), strict=True):
            column.append(stripped(source, values, add_memory))
    return {name: _joined(column, add_memory) for name, column in zip(names, columns, strict=True) if column}


def stripped(source: str, texts: Sequence[str], add_memory: Callable[[int], None]) -> NDArray:
    """Texts as an array, without spaces around them."""
    check_text(f"data {source}", texts)
    add_memory(4 * len(texts) * max(map(len, texts), default=0))  # every text takes as much as the longest
    return np.char.strip(np.asarray(texts, dtype=str))


def _joined(parts: list[NDArray], add_memory: Callable[[int], None]) -> NDArray:
    given = sum(part.nbytes for part in parts)
    add_memory(max(0, sum(map(len, parts)) * max(part.itemsize for part in parts) - given))
    return np.concatenate(parts)


def _separator(header: str = "", row: str = "") -> str:
    """Of those that split the header most often, one that splits the first row as often, if there is any."""

    def fields(line: str, separator: str) -> int:
        return len(next(csv.reader([line], delimiter=separator), []))

    likely = sorted(SEPARATORS, key=lambda separator: -fields(header, separator))
    return next((each for each in likely if 1 < fields(header, each) == fields(row, each)), likely[0])


def _names(source: str, header: list[str]) -> list[str]:
    if len(header) > MOST_COLUMNS:
        most = f"a CSV file may have {MOST_COLUMNS:,}, NumPy arrays and SVMlight files more"
        raise UserError(f"data {source} has {len(header):,} columns; {most}")
    names = [name if name.strip() else f"Unnamed: {number}" for number, name in enumerate(header)]  # as in pandas
    check_text(f"data {source}", names)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"data {source} has the column {twice[0]!r} twice")
    return names


def _checked(source: str, rows: Iterator[list[str]], width: int, separator: str) -> Iterator[list[str]]:
    """Rows are counted from 1, without the header. Lines of spaces are left out."""
    number = 0
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise UserError(f"data {source}: row {number + 1} cannot be read: {error}; {QUOTES}") from None
        if row is None:
            return
        if len(row) == 1 < width and not row[0].strip():
            continue
        number += 1
        if len(row) != width:
            what = f"row {number} has {len(row)} value{'s' * (len(row) != 1)}, and the header has {width} columns"
            ends = "; leave out the separator at the end of rows, and" if len(row) > width and not row[-1] else ";"
            raise UserError(f"data {source}: {what}{ends} quote values that contain {separator!r}")
        yield row
