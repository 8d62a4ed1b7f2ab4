"""trials.csv, written while the trials are read: a data frame of a million trials would need gigabytes.

The file has the same bytes as one written by `frame_to_csv`, which formats numbers by column. Here each value is
formatted alone. The texts differ only in columns that mix floats with text or booleans, or hold very large integers. A
file with such a column, or with a hyperparameter named like another column, is written by `frame_to_csv`.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import IO, Any

from orchestrator.report.tables.memory import LEAST_TRIALS, KnownCell, TableMemory
from orchestrator.report.tables.render import _csv_cell, frame_to_csv, write_text
from orchestrator.results import frames
from orchestrator.results.ledger import Ledger
from orchestrator.results.searches import SearchedCell
from orchestrator.results.trial_columns import TrialColumns
from orchestrator.results.winners import CellResult, Results, SearchResult
from orchestrator.search.variant import SECRET
from orchestrator.study.study import Study
from trainables.files import open_plain, replacing

LARGE = 10**10  # such integers have more than the ten digits with which floats are written
NOT_REPEATABLE = "seconds"
FIRST_COLUMNS = tuple(name for name in frames.TRIAL_COLUMNS if name != NOT_REPEATABLE)
MOST_CONFIGURATIONS = 20_000  # whose formatted texts are cached
QUOTED = (",", '"', "\n", "\r")
SCALARS = {bool, int, float, str, type(None)}
KINDS = {kind.__name__: kind for kind in SCALARS}
NOT_HYPERPARAMETERS = {*FIRST_COLUMNS, NOT_REPEATABLE}


class _MixedColumnError(Exception):
    """A column whose values cannot be formatted one by one."""


@dataclass
class _Part:
    """The lines of a cell."""

    cell: CellResult
    kinds: dict[str, set[type]]
    pieces: list[tuple[int, int]] = field(default_factory=list)
    """Length in the temporary file, and number of columns so far: columns added later are empty in these lines."""
    known: KnownCell | None = None
    """Where the lines are in the old file, if the cell has not changed."""


class TrialsFile:
    """A `TrialCollector` that writes the lines into a temporary file. `folder`: the results folder. The lines of cells
    that have not changed are copied from its trials.csv."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._memory: TableMemory | None = None
        self._body = tempfile.TemporaryFile()  # noqa: SIM115
        self._parts: list[_Part] = []
        self._pieces: list[tuple[int, int]] = []
        """`_Part.pieces` of the cell whose trials are being added."""
        self._own_kinds: dict[str, set[type]] = {}
        """Types of the values in every column, for this cell."""
        self._columns = list(FIRST_COLUMNS)
        self._kinds: dict[str, set[type]] = {}
        """Types of the values in every column, for all cells so far."""
        self._texts: dict[int, tuple[Mapping[str, Any], str]] = {}
        """By `id` of the hyperparameters, an object that trials share: that object, and their columns as text."""
        self._metrics: Sequence[str] = ()
        self._more: Sequence[str] = ()
        """Metrics that have no column in the ledger."""
        self._private = self._mixed = False

    def begin(self, study: Study, searches: int) -> None:
        self._metrics, self._private = study.trial_metrics, study.private
        self._more = [name for name in self._metrics if name not in FIRST_COLUMNS]
        if self._folder is not None and not study.private:
            self._memory = TableMemory.load(self._folder, study)

    def recall(self, name: str) -> SearchResult | None:
        known = self._memory.cells.get(name) if self._memory is not None else None
        return None if known is None else known.search

    def add(self, cell: SearchedCell, stage: str, trials: TrialColumns) -> None:
        if self._mixed:
            return
        try:
            piece = self._lines(cell, stage, trials)
        except _MixedColumnError:
            self._mixed = True
            return
        self._body.write(piece)
        self._pieces.append((len(piece), len(self._columns)))

    def end(self, cell: CellResult) -> None:
        if self._private and cell.confirm:
            self.add(cell, "confirm", TrialColumns.of(cell.confirm.values()))
        part = _Part(cell, self._own_kinds, self._pieces)
        known = self._memory.cells.get(cell.name) if self._memory is not None and not self._pieces else None
        if known is not None and known.search.digest == cell.search.digest:
            part.kinds = {name: {KINDS[kind] for kind in kinds} for name, kinds in known.kinds.items()}
            part.known = known
            self._add_columns(part.kinds)
        for name, kinds in part.kinds.items():
            self._mixed |= _is_mixed(self._kinds.setdefault(name, set()), kinds)
        self._parts.append(part)
        self._pieces, self._own_kinds = [], {}

    def write(self, path: Path, ledger: Ledger, results: Results) -> Path:
        memory = self._memory
        with self._body as body, _old_lines(path, memory, self._columns) as old:
            if self._mixed:
                if memory is not None:
                    memory.forget()
                return write_text(path, frame_to_csv(frames.trials(ledger, results).drop(columns=NOT_REPEATABLE)))
            body.seek(0)
            cells: dict[str, KnownCell] = {}
            with replacing(path) as file:
                file.write(f"{_cells(str(_csv_cell(name)) for name in self._columns)}\n".encode(errors="replace"))
                for part in self._parts:
                    offset, sha256 = file.tell(), hashlib.sha256()
                    for lines in self._lines_of(part, body, old, ledger):
                        file.write(lines)
                        sha256.update(lines)
                    kinds = {name: sorted(kind.__name__ for kind in kinds) for name, kinds in part.kinds.items()}
                    if part.cell.search.digest and KINDS.keys() >= {kind for names in kinds.values() for kind in names}:
                        length = file.tell() - offset
                        known = KnownCell(part.cell.search, offset, length, sha256.hexdigest(), kinds)
                        cells[part.cell.name] = known
        if memory is not None and results.states.total() >= LEAST_TRIALS:
            memory.columns, memory.cells = self._columns, cells
            memory.save()
        return path

    def _lines_of(self, part: _Part, body: IO[bytes], old: IO[bytes] | None, ledger: Ledger) -> Iterator[bytes]:
        if part.known is None:
            for length, columns in part.pieces:
                yield body.read(length).replace(b"\n", b"," * (len(self._columns) - columns) + b"\n")
            return
        if old is not None:
            old.seek(part.known.offset)
            lines = old.read(part.known.length)
            if hashlib.sha256(lines).hexdigest() == part.known.sha256:
                yield lines
                return
        cell = part.cell
        for stage in cell.stages:  # trials.csv or its columns have changed: format the lines again
            whole = bool(self._metrics)
            for _, trials in ledger.stage_trials(cell.cell_id, cell.variant.name, stage, whole=whole):
                if trials is not None:
                    yield self._lines(cell, stage, trials)

    def _lines(self, cell: SearchedCell, stage: str, trials: TrialColumns) -> bytes:
        same = {**frames.names(cell), "stage": stage}
        chosen = [content["hyperparameters"] for content in trials.content]
        configurations = {id(values): values for values in chosen}
        of_specs = {
            "seed": [None if content["seed"] == SECRET else content["seed"] for content in trials.content],
            "clip": [content["privacy"]["clip"] for content in trials.content],
        }
        columns = {
            name: of_specs[name] if name in of_specs else getattr(trials, name)
            for name in FIRST_COLUMNS
            if name not in same
        }
        for name in self._metrics:
            by_trial = zip(trials.metrics, trials.rounds, strict=True)
            columns[name] = [metrics.get(name, {}).get(rounds) for metrics, rounds in by_trial]
        own = self._own_kinds
        for name, value in same.items():
            _check(own.setdefault(name, set()), [value])
        for name, column in columns.items():
            _check(own.setdefault(name, set()), column)
        for values in configurations.values():
            if not NOT_HYPERPARAMETERS.isdisjoint(values) or not set(self._more).isdisjoint(values):
                raise _MixedColumnError
            for name, value in values.items():
                _check(own.setdefault(name, set()), [value])
        self._add_columns(own)
        equal = repeat(_cells(map(_text, same.values())), len(chosen))
        texts = [_texts(column, own[name]) for name, column in columns.items() if name != "key"]
        by_configuration = {number: self._text_of(values) for number, values in configurations.items()}
        last = (by_configuration[id(values)] for values in chosen)
        first = map(",".join, zip(equal, trials.key, *texts, strict=True))
        lines = "\n".join(map("".join, zip(first, last, strict=True)))
        return f"{lines}\n".encode(errors="replace")

    def _add_columns(self, names: Iterable[str]) -> None:
        if len(self._columns) == len(FIRST_COLUMNS):
            self._columns += self._more
        new = [name for name in names if name not in self._columns]
        if new:
            self._columns += new
            self._texts.clear()

    def _text_of(self, values: Mapping[str, Any]) -> str:
        """The hyperparameter columns, which end a line, with a leading comma; empty if there are none."""
        known = self._texts.get(id(values))
        if known is None:
            if len(self._texts) >= MOST_CONFIGURATIONS:
                self._texts.clear()
            names = self._columns[len(FIRST_COLUMNS) + len(self._more) :]
            texts = [_text(values.get(name)) for name in names]
            known = self._texts[id(values)] = values, _cells(["", *texts]) if texts else ""
        return known[1]


@contextlib.contextmanager
def _old_lines(path: Path, memory: TableMemory | None, columns: Sequence[str]) -> Iterator[IO[bytes] | None]:
    """The trials.csv of the last call, open for reading; None if there is none with these columns."""
    if memory is None or memory.columns != columns or not path.is_file() or path.is_symlink():
        yield None
        return
    with open_plain(path) as file:
        yield file


def _check(kinds: set[type], column: Sequence[Any]) -> None:
    """Add the types of a column's values to `kinds`. Raises an error if they cannot be formatted one by one."""
    found = set(map(type, column))
    if int in found and any(type(value) is int and abs(value) >= LARGE for value in column):
        raise _MixedColumnError
    if _is_mixed(kinds, found):
        raise _MixedColumnError


def _is_mixed(kinds: set[type], new: set[type]) -> bool:
    """Add the new types to those of a column; return whether it now mixes floats with text or booleans."""
    kinds |= new
    return float in kinds and not kinds.isdisjoint((str, bool))


def _texts(column: Sequence[Any], kinds: set[type]) -> Iterable[str]:
    """A column as CSV cells; equal values are formatted once."""
    if len(kinds - {type(None)}) > 1 or not kinds <= SCALARS:  # 1 == True; a ledger from elsewhere may hold lists
        return map(_cell, map(_text, column))
    texts = {value: _text(value) for value in set(column)}
    if str in kinds:
        texts = {value: _cell(text) for value, text in texts.items()}
    return map(texts.__getitem__, column)


def _text(value: Any) -> str:
    if type(value) is float:
        return "" if value != value else f"{value:.10g}"
    return "" if value is None else str(_csv_cell(value))


def _cell(text: str) -> str:
    """The text of a CSV cell, quoted where needed."""
    return _cells(["", text])[1:] if any(map(text.__contains__, QUOTED)) else text


def _cells(texts: Iterable[str]) -> str:
    """A line of CSV, or a part of one. Needs at least two texts: a single empty text would be quoted."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(texts)
    return out.getvalue().removesuffix("\n")
