"""Attacks with a part of a study that is merged: its secrets, and its hashes of plug-ins."""

from pathlib import Path

import private_study
import pytest
from private_study import CELL_ID, SECRET, TEXT

from orchestrator.execution import study_run
from orchestrator.execution.merging import _copy, merge
from orchestrator.execution.progress import View
from orchestrator.results.ledger import Ledger
from orchestrator.study.cells import PreparedStudy
from trainables.errors import UserError

KNOWN = b"A" * 32
OTHER = CELL_ID._replace(epsilon=20.0)


def part(folder: Path, *cells, stages=()) -> Path:
    with Ledger.write(folder) as ledger:
        study_run._record_study(ledger, PreparedStudy.prepare(private_study.study()), TEXT)
        ledger.add_secrets(dict.fromkeys(cells, KNOWN))
        for cell in stages:
            ledger.add_stage(cell, "private", "private", [f"{1:024x}"])
    return folder


def resume(folder: Path) -> study_run.Finished:
    return study_run.run(private_study.study(), TEXT, folder, View(), backend="local")


def test_a_secret_without_trials_is_not_taken(tmp_path):
    merge([part(tmp_path / "theirs", CELL_ID, OTHER)], tmp_path / "mine")
    with Ledger.write(tmp_path / "mine") as ledger:
        assert ledger.secrets() == {}
        assert ledger.secret(CELL_ID) != KNOWN


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
    with pytest.raises(UserError, match="merged from another folder before it was finished"):
        resume(tmp_path / "mine")
    with Ledger.read(tmp_path / "mine") as ledger:
        assert ledger.states() == before
    merge([tmp_path / "mine"], tmp_path / "again")
    with pytest.raises(UserError, match="merged from another folder"):
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
        assert ledger.foreign_searches() == {OTHER}
    assert resume(tmp_path / "mine").complete


def test_a_part_does_not_replace_hashes_of_plug_ins(tmp_path):
    part(tmp_path / "mine")
    part(tmp_path / "theirs")
    for name, code in (("mine", {"a": "ours"}), ("theirs", {"a": "theirs", "b": "theirs"})):
        with Ledger.write(tmp_path / name) as ledger:
            ledger.add_plugins([], code)
    with Ledger.read(tmp_path / "theirs") as theirs, Ledger.write(tmp_path / "mine") as mine:
        _copy(theirs, mine, "theirs")
        assert mine.plugin_code() == {"a": "ours", "b": "theirs"}
