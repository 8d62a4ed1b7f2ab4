"""What keeps a study of a million trials small gives the same results as for a small study."""

import dataclasses
import math
import sqlite3

import pandas as pd
import pytest
import reported
from simulated_search import drive, near, study

from orchestrator.execution import sweep
from orchestrator.execution.study_run import rebuild_tables
from orchestrator.report.tables import trials_file, write_tables
from orchestrator.report.tables.render import frame_to_csv
from orchestrator.report.tables.trials_file import TrialsFile
from orchestrator.results import checks, frames
from orchestrator.results.ledger import COLUMNS, NO_CHECKSUM, SCHEMA, Ledger, Row, _checksum
from orchestrator.results.searches import search_records
from orchestrator.results.spec_parts import read_parts
from orchestrator.results.trial_columns import TrialColumns
from orchestrator.results.winners import Results
from orchestrator.search.candidates import paired_difference, within_standard_error
from trainables.errors import UserError
from trainables.federation.trial_spec import TrialSpec


@pytest.mark.parametrize("most", [1, 4])
def test_searches_that_open_later_run_the_same_trials(tmp_path, monkeypatch, most):
    at_once = drive(tmp_path / "at once", study(), near(0.3)).stages
    monkeypatch.setattr(sweep, "OPEN_TRIALS", most)
    assert drive(tmp_path / "later", study(), near(0.3)).stages == at_once


def test_recorded_winners_are_those_of_the_trials(tmp_path):
    drive(tmp_path, study(), near(0.3))
    with Ledger.read(tmp_path) as ledger:
        found = Results.read(ledger).study
        recorded, computed = (list(search_records(ledger, found, verified=verified)) for verified in (False, True))
        assert all(record.known_winner for record in recorded)
        for known, other in zip(recorded, computed, strict=True):
            assert known.winner is not None
            assert other.winner is not None
            assert (known.winner.candidate, known.winner.score) == (other.winner.candidate, other.winner.score)


def columns(values: list) -> TrialColumns:
    """One trial per value of its hyperparameter x; None: the trial has no such hyperparameter."""
    found: dict[str, list] = {name: [0.1 + 0.2] * len(values) for name in TrialColumns._fields}
    chosen = [{} if value is None else {"x": value} for value in values]
    content = [{"seed": 7, "privacy": {"clip": 3.0}, "hyperparameters": each} for each in chosen]
    keys = [str(number) for number in range(len(values))]
    texts = {"key": keys, "state": ["done"] * len(values), "reason": [""] * len(values)}
    return TrialColumns(**found | texts | {"rounds": [20] * len(values), "content": content})


@pytest.mark.parametrize(
    "values",
    [
        [1, 2],
        [1, 2.5, 1e-7],
        [None, 3, 12],
        [None, 0.1 + 0.2, 7],
        [True, None, False],
        [True, 1, None],
        ["auto", "none", None],
        ["auto", 0.1 + 0.2],
        [True, 0.1 + 0.2],
        [10**12, None],
        ["=1+1", "a,b", 'c"d'],
        [None, None],
    ],
    ids=str,
)
def test_trials_are_written_as_their_frame_would_be(tmp_path, monkeypatch, values):
    reported.write(tmp_path)
    trials = columns(values)
    with Ledger.read(tmp_path) as ledger:
        results = Results.read(ledger)
        file = TrialsFile()
        file.begin(results.study, 1)
        for place in range(len(values)):
            file.add(results.cells[0], "coarse", trials.at([place]))
        file.end(results.cells[0])
        rows = [(results.cells[0], "coarse", row) for row in Row.from_columns(trials)]
        monkeypatch.setattr(frames, "_ended", lambda *arguments, **options: rows)
        written = file.write(tmp_path / "trials.csv", ledger, results).read_text()
        frame = frames.trials(ledger, results).drop(columns="seconds")
    assert written == frame_to_csv(frame)
    assert len(pd.read_csv(tmp_path / "trials.csv")) == len(values)


def test_lines_collected_while_results_are_read_are_all_trials(tmp_path):
    drive(tmp_path, study(), near(0.3))
    with Ledger.read(tmp_path) as ledger:
        (written, results) = write_tables(ledger, tmp_path)
        frame = frames.trials(ledger, results).drop(columns="seconds")
    (path,) = (path for path in written if path.name == "trials.csv")
    assert path.read_text() == frame_to_csv(frame)


# ---- tables that are built again


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A results folder with tables that are remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trials_file, "LEAST_TRIALS", 0)
    drive(tmp_path / "r", study(), near(0.3))
    rebuild_tables(tmp_path / "r")
    return tmp_path / "r"


def computed_cells(folder, monkeypatch):
    """The cells whose trials are read while the tables are built."""
    read: dict[str, None] = {}
    add = TrialsFile.add

    def adding(self, cell, *trials):
        read[cell.name] = None
        add(self, cell, *trials)

    monkeypatch.setattr(TrialsFile, "add", adding)
    rebuild_tables(folder)
    monkeypatch.setattr(TrialsFile, "add", add)
    return list(read)


def content(folder):
    files = [*(folder / "tables").iterdir(), *(folder / "timing").iterdir(), folder / "best.yaml"]
    return {file.name: file.read_bytes() for file in files}


def without_memory(folder, monkeypatch):
    """The tables that are built from the ledger alone."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "empty"))
        rebuild_tables(folder)
    return content(folder)


def test_tables_of_unchanged_cells_are_not_computed_again(built, monkeypatch):
    before = content(built)
    assert computed_cells(built, monkeypatch) == []
    assert content(built) == before == without_memory(built, monkeypatch)


def test_only_a_cell_with_another_trial_is_computed_again(built, monkeypatch):
    with Ledger.write(built) as ledger:
        stages = ledger.stages()
        place = next(place for place in stages if place[2] == "confirm")
        key = stages[place][-1]
        ledger.forget([key], {})
    assert len(computed_cells(built, monkeypatch)) == 1
    assert key not in (built / "tables" / "trials.csv").read_text()
    assert content(built) == without_memory(built, monkeypatch)


def test_an_edited_file_and_a_damaged_memory_are_not_used(built, monkeypatch, tmp_path):
    before = content(built)
    file = built / "tables" / "trials.csv"
    file.write_bytes(before["trials.csv"].replace(b"done", b"gone", 1))
    assert computed_cells(built, monkeypatch) == []
    assert content(built) == before
    (memory,) = (tmp_path / "cache").rglob("*.json")
    for text in ("{", "[]", memory.read_text().replace('"seconds":"', '"seconds":"x')):
        memory.write_text(text)
        assert len(computed_cells(built, monkeypatch)) > 1
        assert content(built) == before


def test_rows_of_unchanged_cells_are_verified(built):
    with sqlite3.connect(built / "ledger.sqlite") as connection:
        connection.execute("UPDATE trials SET seconds = seconds + 1 WHERE number = 1")
    connection.close()
    with pytest.raises(UserError, match="does not match its checksum"):
        rebuild_tables(built)


ROW = ("a" * 24, '{"x":1}', "done", "", 20, 50.0, 0.5, "{}", 1.0, 0.9, 0.5, 0.9, 2.0, b"\x00'")


@pytest.mark.parametrize(
    "changed",
    [
        *({}, {3: "it's"}, {3: "ä"}, {1: "it's"}, {1: '{"x":"ä"}'}, {1: "a\\b"}, {1: "a\nb"}, {7: "'"}, {3: "\0"}),
        *({5: None, 6: None}, {5: 50}, {6: math.nan}, {6: -0.0}, {9: -0.0}, {9: 0.0}, {10: 1}, {12: 3}),
        *({12: math.inf}, {8: math.inf}, {8: -math.inf, 9: math.inf}, {13: b""}),
    ],
    ids=str,
)
def test_the_checksum_of_a_row_is_that_of_what_sqlite_returns(changed):
    """It has floats in the columns of floats, nothing in place of NaN, and no -0.0."""
    values = [changed.get(position, value) for position, value in enumerate(ROW)]
    db = sqlite3.connect(":memory:")
    db.executescript(SCHEMA)
    names = COLUMNS.removeprefix("key, ")
    db.execute(f"INSERT INTO trials ({names}, checksum) VALUES ({', '.join('?' * len(values))})", (*values[1:], 0))
    (stored,) = db.execute(f"SELECT {names} FROM trials")
    assert _checksum(values) == _checksum((values[0], *stored))


def test_a_row_has_a_field_for_every_column():
    assert (*(field.name for field in dataclasses.fields(Row)), "content") == TrialColumns._fields


def test_every_value_of_a_row_counts_for_its_checksum():
    others = ["b" * 24, "{}", "failed", "x", 21, 51.0, None, "[]", 1.5, 0.8, 0.6, 0.8, 2.5, b"\x01"]
    changed = [[*ROW[:place], other, *ROW[place + 1 :]] for place, other in enumerate(others)]
    assert len({_checksum(values) for values in (ROW, *changed)}) == len(ROW) + 1
    for place in range(len(ROW)):
        odd = [*ROW[:place], ["a list"], *ROW[place + 1 :]]
        assert _checksum(odd) == NO_CHECKSUM


@pytest.mark.parametrize(
    "changed",
    [
        *({0: "A" * 24}, {2: "ended"}, {3: 1}, {4: -1}, {4: 2.0}, {5: 101.0}, {5: "x"}),
        *({6: b""}, {8: None}, {12: "1"}, {13: ""}),
    ],
    ids=str,
)
def test_columns_are_refused_as_their_rows_are(changed):
    trial = '{"hyperparameters":{},"privacy":{"clip":1.0},"rounds":20,"stop_after":null,"seed":1}'
    right = (*ROW[:1], trial, *ROW[2:])
    wrong = tuple(changed.get(position, value) for position, value in enumerate(right))
    assert len(checks.columns([right, right])) == len(TrialColumns._fields)
    with pytest.raises(sqlite3.DataError):
        checks.row(wrong)
    with pytest.raises(sqlite3.DataError):
        checks.columns([right, wrong])


def test_parts_of_a_specification_are_read_as_the_whole(tmp_path):
    drive(tmp_path, study(), near(0.3))
    with Ledger.read(tmp_path) as ledger:
        for row in ledger.rows(ledger.outcomes()).values():
            assert read_parts(row.spec) == row.content
            assert TrialSpec.model_validate(row.content) == row.trial


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"hyperparameters":1,"privacy":2}',
        '{"a":"\\"hyperparameters\\":{},\\"privacy\\":"}',
        '{"hyperparameters":{},"privacy":{},"hyperparameters":{"x":1}}',
    ],
)
def test_texts_of_another_form_are_not_read_in_parts(text):
    assert read_parts(text) is None


@pytest.mark.parametrize("theirs", [[50.0, 51.0, 52.0], [51.0, 51.0, 51.0], [50.5, None, 52.5], [None, None, None]])
def test_within_the_standard_error(theirs):
    ours = [51.0, 51.5, 52.5]
    exact = paired_difference(ours, theirs)
    assert within_standard_error(ours, theirs) == (exact is not None and abs(exact[0]) <= exact[1])
