"""A ledger with a changed digit: nothing that was finished is lost, and the results are those of an undisturbed run."""

import sqlite3
from pathlib import Path

import chaos
import pytest
from chaos import Left

from orchestrator.execution import study_run
from orchestrator.execution.progress import View
from orchestrator.study.reading import parse

pytestmark = [pytest.mark.ray, pytest.mark.chaos]


def run_alone(folder: Path, text: str) -> Left:
    study_run.run(parse(text, "study.yaml", Path.cwd()), text, folder, View(), backend="local")
    return Left.of(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Left:
    return run_alone(tmp_path_factory.mktemp("undisturbed") / "results", chaos.study())


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "results"


def test_a_digit_of_the_ledger_changes(folder, undisturbed, tally, fedsweep):
    """The row is named, forgotten by `check --repair` and computed again."""
    run_alone(folder, chaos.study())
    tables = {file: file.read_bytes() for file in (folder / "tables").iterdir()}
    with sqlite3.connect(folder / "ledger.sqlite") as connection:
        key, before = connection.execute("SELECT key, epsilon_local FROM trials WHERE state = 'done'").fetchone()
        connection.execute("UPDATE trials SET epsilon_local = ? WHERE key = ?", (before + 1, key))
    connection.close()
    tally.add("digit of the ledger changes", "elsewhere")
    for command in ("tables", "resume"):
        code, _, err = fedsweep(command, folder)
        assert code == 2
        assert f"the row of trial '{key}' does not match its checksum" in err
    assert {file: file.read_bytes() for file in tables} == tables
    assert fedsweep("check", folder, "--repair")[0] == 0
    assert run_alone(folder, chaos.study()) == undisturbed
