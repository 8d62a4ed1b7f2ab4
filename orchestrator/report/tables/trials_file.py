"""trials.csv, written while the trials are read: a data frame of a million trials would need gigabytes.

The file is the one that `frame_to_csv` would write. It formats numbers by column; here each value is formatted alone.
The two differ only in columns that mix numbers with text, or that hold very large integers: then the frame is written.
"""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

from orchestrator.report.tables.render import _csv_cell, frame_to_csv, write_text
from orchestrator.results import frames
from orchestrator.results.ledger import Ledger
from orchestrator.results.searches import SearchedCell
from orchestrator.results.trial_columns import TrialColumns
from orchestrator.results.winners import CellResult, Results
from orchestrator.search.variant import SECRET
from orchestrator.study.study import Study
from trainables.files import replacing

LARGE = 10**10  # an integer with more digits than a float is written with
NOT_REPEATABLE = "seconds"
FIRST_COLUMNS = tuple(name for name in frames.TRIAL_COLUMNS if name != NOT_REPEATABLE)
MOST_CONFIGURATIONS = 20_000  # whose texts are kept
QUOTED = (",", '"', "\n", "\r")
SCALARS = {bool, int, float, str, type(None)}


class _MixedColumnError(Exception):
    """A column whose values cannot be formatted one by one."""


class TrialsFile:
    """A `TrialCollector` that writes the lines into a temporary file."""

    def __init__(self) -> None:
        self._body = tempfile.TemporaryFile()  # noqa: SIM115
        self._parts: list[tuple[int, int]] = []
        """Length and number of columns of every part: columns that appear later are empty in earlier lines."""
        self._columns = list(FIRST_COLUMNS)
        self._kinds: dict[str, set[type]] = {}
        self._texts: dict[int, tuple[Mapping[str, Any], str]] = {}
        """By the identity of the hyperparameters, which trials share: the texts of the columns that follow."""
        self._metrics: Sequence[str] = ()
        self._more: Sequence[str] = ()
        """Metrics that have no column in the ledger."""
        self._private = self._mixed = False

    def begin(self, study: Study, searches: int) -> None:
        self._metrics, self._private = study.trial_metrics, study.private
        self._more = [name for name in self._metrics if name not in FIRST_COLUMNS]

    def add(self, cell: SearchedCell, stage: str, trials: TrialColumns) -> None:
        if self._mixed:
            return
        try:
            part = self._lines({**frames.names(cell), "stage": stage}, trials)
        except _MixedColumnError:
            self._mixed = True
            return
        self._body.write(part)
        self._parts.append((len(part), len(self._columns)))

    def end(self, cell: CellResult) -> None:
        if self._private and cell.confirm:
            self.add(cell, "confirm", TrialColumns.of(cell.confirm.values()))

    def write(self, path: Path, ledger: Ledger, results: Results) -> Path:
        with self._body as body:
            if self._mixed:
                return write_text(path, frame_to_csv(frames.trials(ledger, results).drop(columns=NOT_REPEATABLE)))
            body.seek(0)
            with replacing(path) as file:
                file.write(f"{_cells(str(_csv_cell(name)) for name in self._columns)}\n".encode(errors="replace"))
                for length, known in self._parts:
                    file.write(body.read(length).replace(b"\n", b"," * (len(self._columns) - known) + b"\n"))
        return path

    def _lines(self, same: Mapping[str, Any], trials: TrialColumns) -> bytes:
        """`same`: the first columns, equal for all of these trials."""
        chosen = [content["hyperparameters"] for content in trials.content]
        configurations = {id(values): values for values in chosen}
        self._add_columns(configurations.values())
        columns = {
            "key": trials.key,
            "seed": [None if content["seed"] == SECRET else content["seed"] for content in trials.content],
            "state": trials.state,
            "reason": trials.reason,
            "rounds": trials.rounds,
            "accuracy": trials.accuracy,
            "loss": trials.loss,
            "epsilon_claimed": trials.epsilon_claimed,
            "epsilon_local": trials.epsilon_local,
            "epsilon_secure": trials.epsilon_secure,
            "epsilon_unsampled": trials.epsilon_unsampled,
            "clip": [content["privacy"]["clip"] for content in trials.content],
        }
        for name in self._metrics:
            by_trial = zip(trials.metrics, trials.rounds, strict=True)
            columns[name] = [metrics.get(name, {}).get(rounds) for metrics, rounds in by_trial]
        for name, value in same.items():
            _check(self._kinds.setdefault(name, set()), [value])
        for name, column in columns.items():
            _check(self._kinds.setdefault(name, set()), column)
        equal = repeat(_cells(map(_text, same.values())), len(chosen))
        texts = [_texts(column, self._kinds[name]) for name, column in columns.items() if name != "key"]
        by_configuration = {number: self._text_of(values) for number, values in configurations.items()}
        last = (by_configuration[id(values)] for values in chosen)
        first = map(",".join, zip(equal, trials.key, *texts, strict=True))
        lines = "\n".join(map("".join, zip(first, last, strict=True)))
        return f"{lines}\n".encode(errors="replace")

    def _add_columns(self, configurations: Iterable[Mapping[str, Any]]) -> None:
        if len(self._columns) == len(FIRST_COLUMNS):
            self._columns += self._more
        own = {*FIRST_COLUMNS, *self._more, NOT_REPEATABLE}
        for values in configurations:
            if not own.isdisjoint(values):
                raise _MixedColumnError
            new = [name for name in values if name not in self._columns]
            if new:
                self._columns += new
                self._texts.clear()

    def _text_of(self, values: Mapping[str, Any]) -> str:
        """The end of a line, from a comma on; empty if there are no further columns."""
        known = self._texts.get(id(values))
        if known is None:
            if len(self._texts) >= MOST_CONFIGURATIONS:
                self._texts.clear()
            for name, value in values.items():
                _check(self._kinds.setdefault(name, set()), [value])
            names = self._columns[len(FIRST_COLUMNS) + len(self._more) :]
            texts = [_text(values.get(name)) for name in names]
            known = self._texts[id(values)] = values, _cells(["", *texts]) if texts else ""
        return known[1]


def _check(kinds: set[type], column: Sequence[Any]) -> None:
    kinds.update(map(type, column))
    if int in kinds and any(type(value) is int and abs(value) >= LARGE for value in column):
        raise _MixedColumnError
    if float in kinds and not kinds.isdisjoint((str, bool)):
        raise _MixedColumnError


def _texts(column: Sequence[Any], kinds: set[type]) -> Iterable[str]:
    """Values that repeat are formatted once."""
    if len(kinds - {type(None)}) > 1 or not kinds <= SCALARS:  # 1 == True; a stranger's ledger may hold lists
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
    """With quotes where CSV needs them."""
    return _cells(["", text])[1:] if any(map(text.__contains__, QUOTED)) else text


def _cells(texts: Iterable[str]) -> str:
    """A line of CSV, or a part of one that is not its only cell."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(texts)
    return out.getvalue().removesuffix("\n")
