"""Attacks with a part of a study that is merged: its secrets, and its hashes of plug-ins."""

import contextlib
import sqlite3
from pathlib import Path

import private_study
import pytest
from private_study import CELL_ID, SECRET, TEXT, purpose

from orchestrator.execution import study_run
from orchestrator.execution.merging import _copy, merge
from orchestrator.execution.progress import View
from orchestrator.results import ledger as ledger_module
from orchestrator.results.ledger import Ledger
from orchestrator.study.cells import PreparedStudy
from trainables.errors import UserError

KNOWN = b"A" * 32
OTHER = CELL_ID._replace(epsilon=20.0)


def part(folder: Path, *cells, stages=()) -> Path:
    with Ledger.write(folder) as ledger:
        study_run._record_study(ledger, PreparedStudy.prepare(private_study.study()), TEXT)
        ledger.add_secrets(dict.fromkeys(cells, KNOWN), purpose())
        for cell in stages:
            ledger.add_stage(cell, "private", "private", [f"{1:024x}"])
    return folder


def resume(folder: Path) -> study_run.Finished:
    return study_run.run(private_study.study(), TEXT, folder, View(), backend="local")


def test_a_secret_without_trials_is_not_taken(tmp_path):
    merge([part(tmp_path / "theirs", CELL_ID, OTHER)], tmp_path / "mine")
    with Ledger.write(tmp_path / "mine") as ledger:
        assert ledger.secrets() == {}
        assert ledger.secret(CELL_ID, purpose()).value != KNOWN


@pytest.mark.parametrize("lost", ["all", "confirm"])
def test_an_unfinished_private_search_of_another_folder_is_not_continued(lost, tmp_path):
    """Not even if only the confirm run is missing: it would publish the model with noise that a stranger knows."""
    private_study.run(tmp_path / "theirs")
    with Ledger.write(tmp_path / "theirs") as ledger:
        stages = ledger.stages()
        confirm = stages[CELL_ID, "private", "confirm"]
        ledger.forget(confirm if lost == "confirm" else ledger.outcomes(), {})
    merge([tmp_path / "theirs"], tmp_path / "mine")
    with Ledger.read(tmp_path / "mine") as ledger:
        before = ledger.states()
    with pytest.raises(UserError, match="began in another folder"):
        resume(tmp_path / "mine")
    with Ledger.read(tmp_path / "mine") as ledger:
        assert ledger.states() == before
    merge([tmp_path / "mine"], tmp_path / "again")
    with pytest.raises(UserError, match="began in another folder"):
        resume(tmp_path / "again")
    assert resume(tmp_path / "theirs").complete, "it continues where it began"
    merge([tmp_path / "theirs"], tmp_path / "mine")
    assert resume(tmp_path / "mine").complete


def test_ones_own_search_continues_after_a_merge(tmp_path):
    private_study.run(tmp_path / "mine")
    with Ledger.write(tmp_path / "mine") as ledger:
        ledger.forget(ledger.stages()[CELL_ID, "private", "confirm"], {})
    merge([part(tmp_path / "theirs", OTHER, stages=[OTHER])], tmp_path / "mine")
    with Ledger.read(tmp_path / "mine") as ledger:
        assert ledger.secrets() == {CELL_ID: SECRET, OTHER: KNOWN}
    with Ledger.write(tmp_path / "mine") as ledger:
        assert ledger.secret(CELL_ID, purpose()) == (SECRET, True)
        assert ledger.secret(OTHER, purpose()) == (KNOWN, False)
    assert resume(tmp_path / "mine").complete


def test_a_secret_that_this_user_has_not_drawn_is_not_used(tmp_path, monkeypatch):
    """A prepared folder may have the secret of a search that has not begun, and no study."""
    with monkeypatch.context() as theirs:
        theirs.setattr(ledger_module, "user_key", lambda: b"of a stranger")
        with Ledger.write(tmp_path) as ledger:
            ledger.add_secrets({CELL_ID: KNOWN}, purpose())
    with pytest.raises(UserError, match="or by another user, who may know its secret"):
        resume(tmp_path)
    with Ledger.read(tmp_path) as ledger:
        assert ledger.states() == {}


OTHER_TEXTS = {
    "clip": TEXT.replace("clip: 2", "clip: 3"),
    "clients": TEXT.replace("clients: 4", "clients: 5"),
    "rounds": TEXT.replace("confirm: 6", "confirm: 8"),
    "trials": TEXT.replace("trials: 6", "trials: 7"),
    "distribution": TEXT.replace("trials: 6}", "trials: 6, private: {runs: logarithmic}}"),
}


@pytest.mark.parametrize("change", OTHER_TEXTS)
def test_a_secret_is_for_one_search(tmp_path, change):
    """Someone who has seen one of my ledgers knows its secret, and must not know the noise of another search."""
    other = OTHER_TEXTS[change]
    assert other != TEXT
    with Ledger.write(tmp_path) as ledger:
        ledger.add_secrets({CELL_ID: KNOWN}, purpose())
    with pytest.raises(UserError, match="who may know its secret"):
        study_run.run(private_study.study(other), other, tmp_path, View(), backend="local")
    with Ledger.read(tmp_path) as ledger:
        assert ledger.states() == {}


def test_a_secret_is_for_one_objective():
    """The trials are the same."""
    one, other = (f"{TEXT}objective: {a}\nmetrics: [{b}]\n" for a, b in (("accuracy", "top_5"), ("top_5", "accuracy")))
    assert purpose(one) != purpose(other)


def test_an_index_that_contradicts_its_table_finds_no_secret_of_others(tmp_path, monkeypatch):
    """The table says that the secret belongs to another cell, the index says that it belongs to this one."""
    decoy = CELL_ID._replace(epsilon=1.0)
    with monkeypatch.context() as theirs:
        theirs.setattr(ledger_module, "user_key", lambda: b"of a stranger")
        with Ledger.write(tmp_path) as ledger:
            ledger.add_secrets({CELL_ID: KNOWN}, purpose())
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)) as db:
        root = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_cells_1'").fetchone()[0]
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = db.execute("PRAGMA page_size").fetchone()[0]
        file = tmp_path / "ledger.sqlite"
        before = file.read_bytes()[(root - 1) * size : root * size]
        db.execute("UPDATE cells SET epsilon = ?", (decoy.epsilon,))
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(file.read_bytes())
    content[(root - 1) * size : root * size] = before
    file.write_bytes(content)
    with Ledger.write(tmp_path) as ledger:
        assert ledger._cells() == {1: decoy}
        assert ledger.secret(CELL_ID, purpose()) == (KNOWN, False)
    with pytest.raises(UserError, match="who may know its secret"):
        resume(tmp_path)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE cells (number INTEGER DEFAULT 7, data TEXT, partition TEXT, method TEXT, epsilon REAL)",
        "CREATE TABLE cells (number INTEGER PRIMARY KEY ON CONFLICT REPLACE, data, partition, method, epsilon)",
        "CREATE TABLE another (number INTEGER)",
        "CREATE INDEX another ON cells (data)",
    ],
)
def test_other_definitions_of_tables_are_refused(tmp_path, statement):
    """With a default, a new cell would get the number of a cell whose secret the author of the folder knows."""
    with Ledger.write(tmp_path):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)) as db:
        if "TABLE cells" in statement:
            db.execute("DROP TABLE cells")
        db.execute(statement)
    for opened in (Ledger.read, Ledger.write):
        with pytest.raises(UserError, match="its tables have other definitions"), opened(tmp_path):
            pass


def test_a_part_does_not_replace_hashes_of_plug_ins(tmp_path):
    part(tmp_path / "mine")
    part(tmp_path / "theirs")
    for name, code in (("mine", {"a": "ours"}), ("theirs", {"a": "theirs", "b": "theirs"})):
        with Ledger.write(tmp_path / name) as ledger:
            ledger.add_plugins([], code)
    with Ledger.read(tmp_path / "theirs") as theirs, Ledger.write(tmp_path / "mine") as mine:
        _copy(theirs, mine, "theirs")
        assert mine.plugin_code() == {"a": "ours", "b": "theirs"}
