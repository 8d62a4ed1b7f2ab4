"""trials.csv, written row by row: a data frame of a million trials would need gigabytes.

The file is the one that `frame_to_csv` would write. It formats numbers by column; here each value is formatted alone.
The two differ only in columns that mix numbers with text, or that hold very large integers: then the frame is written.
"""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

from orchestrator.report.tables.render import _csv_cell, frame_to_csv, write_text
from orchestrator.results import frames
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results
from trainables.files import replacing

LINES = 2000  # formatted at a time
LARGE = 10**10  # an integer with more digits than a float is written with
NOT_REPEATABLE = "seconds"
SCALARS = {bool, int, float, str, type(None)}


class _MixedColumnError(Exception):
    """A column whose values cannot be formatted one by one."""


def write_trials(path: Path, ledger: Ledger, results: Results) -> Path:
    with suppress(_MixedColumnError), tempfile.TemporaryFile() as body:
        columns = [name for name in frames.TRIAL_COLUMNS if name != NOT_REPEATABLE]
        parts = list(_write_lines(body, frames.trial_lines(ledger, results), columns))
        body.seek(0)
        with replacing(path) as file:
            file.write(_as_csv([[_csv_cell(name) for name in columns]]))
            for length, known in parts:  # columns that appear later are empty in earlier lines
                file.write(body.read(length).replace(b"\n", b"," * (len(columns) - known) + b"\n"))
        return path
    return write_text(path, frame_to_csv(frames.trials(ledger, results).drop(columns=NOT_REPEATABLE)))


def _write_lines(body: IO[bytes], lines: Iterator[dict[str, Any]], columns: list[str]) -> Iterator[tuple[int, int]]:
    """Length and number of columns of every part. Adds columns as they appear."""
    kinds: dict[str, set[type]] = {}
    last: Any = None
    while chunk := list(islice(lines, LINES)):
        for line in chunk:
            if line.keys() != last:
                last = line.keys()
                columns += [name for name in last if name != NOT_REPEATABLE and name not in columns]
        values = [[line.get(name) for line in chunk] for name in columns]
        for name, column in zip(columns, values, strict=True):
            _check(kinds.setdefault(name, set()), column)
        columns_of_text = [_texts(column, kinds[name]) for name, column in zip(columns, values, strict=True)]
        part = _as_csv(zip(*columns_of_text, strict=True))
        body.write(part)
        yield len(part), len(columns)


def _check(kinds: set[type], column: Sequence[Any]) -> None:
    kinds.update(map(type, column))
    if int in kinds and any(type(value) is int and abs(value) >= LARGE for value in column):
        raise _MixedColumnError
    if float in kinds and not kinds.isdisjoint((str, bool)):
        raise _MixedColumnError


def _texts(column: Sequence[Any], kinds: set[type]) -> Iterable[str]:
    """Values that repeat are formatted once."""
    if len(kinds - {type(None)}) > 1 or not kinds <= SCALARS:  # 1 == True; a stranger's ledger may hold lists
        return map(_text, column)
    texts = {value: _text(value) for value in set(column)}
    return map(texts.__getitem__, column)


def _text(value: Any) -> str:
    if type(value) is float:
        return "" if value != value else f"{value:.10g}"
    return "" if value is None else str(_csv_cell(value))


def _as_csv(lines: Iterable[Iterable[Any]]) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue().encode("utf-8", errors="replace")
