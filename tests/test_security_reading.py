"""Attacks with files that block or never end, huge values, and names that change the commands that are printed."""

import json
import os
import shlex
import sqlite3
import warnings

import pytest
from handmade_ledgers import change

from orchestrator.report.figures import write_figures
from orchestrator.results import forgetting
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import results_location
from trainables import files, models, plugins
from trainables.data.importing.reading import read_table
from trainables.errors import UserError
from trainables.urls import shown

ESC = "\x1b]0;title\x07\x1b[2J"


# ---- pipes and devices


def test_only_plain_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path, follow in ((tmp_path / "pipe", False), (tmp_path / "link", True), (tmp_path, True)):
        with pytest.raises(UserError, match="is not a plain file"):
            files.open_plain(path, follow=follow)
    with pytest.raises(UserError, match="is a symbolic link"):
        files.open_plain(tmp_path / "link")
    (tmp_path / "text").write_bytes(b"a\r\nb\n")
    assert files.read_plain_text(tmp_path / "text") == "a\nb\n"
    with pytest.raises(UserError, match="is larger than 4 bytes"):
        files.read_plain(tmp_path / "text", 4)


@pytest.mark.parametrize(
    "command",
    [
        "train --from pipe.yaml --cell x",
        "predict pipe.npz x.csv --output y.csv",
        "data import pipe.csv --label y --to new.npz",
        "data import pipe.npz --label y --to new.npz",
        "plan pipe.yaml",
        "lookup pipe.parquet --method dp-fedgd --epsilon 1",
    ],
)
def test_a_pipe_does_not_block_a_command(command, tmp_path, fedsweep, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for ending in ("yaml", "npz", "csv", "parquet"):
        os.mkfifo(f"pipe.{ending}")
    code, _, err = fedsweep(*command.split())
    assert code == 2
    assert "is not a plain file" in err


@pytest.mark.parametrize(
    "command",
    [
        "run file://{}/pipe.yaml",
        "run study.yaml --backend local --results new",
        "train --from file://{}/pipe.yaml",
        "data import file://{}/pipe.csv --label y --to new.npz",
        "data import table.csv --schema file://{}/pipe.yaml --to new.npz",
    ],
)
def test_a_pipe_behind_a_url_does_not_block_a_command(command, tmp_path, fedsweep, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for ending in ("yaml", "npz", "csv"):
        os.mkfifo(f"pipe.{ending}")
    (tmp_path / "table.csv").write_text("x,y\n1,2\n")
    (tmp_path / "study.yaml").write_text(
        f"name: a\ndata: ['file://{tmp_path}/pipe.npz']\nmethods: [dp-fedgd]\nepsilons: [1]\n"
    )
    code, _, err = fedsweep(*command.format(tmp_path).split())
    assert code == 2
    assert "is not a plain file" in err


TOKEN = "0123456789abcdef"


@pytest.mark.parametrize(
    "name", ["remote.lock", f"remote.lock.{TOKEN}", "cancel.requested", "cancel.now", "ledger.sqlite", "fedsweep.log"]
)
def test_a_pipe_in_results_behind_a_url_does_not_block(name, results, fedsweep):
    if name != "remote.lock":
        (results / "remote.lock").write_text(json.dumps({"holder": "a", "token": TOKEN, "alive": 0}))
    (results / name).unlink(missing_ok=True)
    os.mkfifo(results / name)
    for command in (("status",), ("resume", "--backend", "local"), ("cancel",)):
        code, _, err = fedsweep(command[0], f"file://{results}", *command[1:])
        assert code == 2
        assert "is not a plain file" in err


def test_a_request_to_stop_is_a_plain_file(tmp_path):
    location = results_location(tmp_path)
    os.mkfifo(tmp_path / "cancel.requested")
    with pytest.raises(UserError, match="is not a plain file"):
        location.stop_requested()
    (tmp_path / "cancel.requested").unlink()
    (tmp_path / "cancel.requested").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="is a symbolic link"):
        location.stop_requested()


# ---- huge and malformed values


def test_of_a_huge_journal_only_the_end_is_read(results, fedsweep):
    with (results / "ledger.sqlite-journal").open("wb") as file:
        file.truncate(200 << 30)
    code, _, err = fedsweep("status", results)
    assert code == 0, err


def test_a_model_with_thousands_of_digits_is_refused():
    with pytest.raises(UserError, match="HIDDEN has 5000 digits"):
        models.parse("mlp:" + "9" * 5000, features=4, classes=2)


def test_a_very_wide_table_is_refused_at_once(tmp_path):
    (tmp_path / "wide.csv").write_text(",".join(f"c{i}" for i in range(200_000)) + "\n" + ",".join("1" * 200_000))
    with pytest.raises(UserError, match="has 200,000 columns"):
        read_table(str(tmp_path / "wide.csv"))


@pytest.mark.parametrize("code", ["{", "[1]", "5", "[" * 100_000])
def test_the_code_of_a_session_is_json(code, tmp_path):
    from orchestrator.execution.progress import View
    from orchestrator.execution.study_run import _tell_changed_package

    with Ledger.write(tmp_path / "r") as ledger:
        ledger.begin_session({"code parts": code})
        with pytest.raises(UserError, match="is damaged: the 'code parts' of a session"):
            _tell_changed_package(ledger, View())


def test_generated_columns_are_not_believed(results, fedsweep):
    """SQLite computes them when a row is written or read."""
    change(results, "ALTER TABLE studies RENAME TO old")
    change(results, "CREATE TABLE studies (number INTEGER PRIMARY KEY, study TEXT NOT NULL, "
                     "source TEXT GENERATED ALWAYS AS (hex(zeroblob(100000000))) STORED)")  # fmt: skip
    change(results, "INSERT INTO studies (number, study) SELECT number, study FROM old")
    code, _, err = fedsweep("status", results)
    assert code == 2
    assert "is damaged" in err


# ---- printed commands

NAMES = ("a b", "x; touch owned", "$(touch owned)", "s3://u:p@h/x?sig='; touch owned #", "it's://a?b; touch owned")


@pytest.mark.parametrize("name", NAMES)
def test_a_printed_command_stays_one_command(name):
    words = shlex.split(shown(plugins.command("resume", name)))  # as messages show it
    assert words[:2] == ["fedsweep", "resume"]
    assert len(words) == 3


def test_check_and_forget_quote_the_folder(results, fedsweep, monkeypatch):
    monkeypatch.setattr(forgetting, "forget_node", lambda *_: forgetting.Forgotten(1, 1))
    folder = results.rename(results.with_name("x; touch owned"))
    change(folder, "UPDATE trials SET seconds = seconds + 1")
    for command in (("check", folder), ("check", folder, "--repair"), ("forget", folder, "--node", "none")):
        _, _, err = fedsweep(*command)
        assert f"fedsweep resume {shlex.quote(str(folder))}" in err


# ---- control characters


def test_figures_print_no_control_characters(results, capfd):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        relabelled(results)
        write_figures(results)
    assert not [str(warning.message) for warning in said if "Glyph" in str(warning.message)]
    assert "\x1b" not in "".join(capfd.readouterr())


def relabelled(folder):
    connection = sqlite3.connect(folder / "ledger.sqlite")
    ((number, text),) = connection.execute("SELECT number, study FROM studies").fetchall()
    content = json.loads(text)
    for data in content["data"]:
        data["label"] = f"label {ESC}"
    connection.execute("UPDATE studies SET study = ?, source = ? WHERE number = ?", (json.dumps(content), ESC, number))
    connection.commit()
    connection.close()


def test_a_merged_study_file_has_no_control_characters(results, tmp_path, fedsweep):
    relabelled(results)
    code, _, err = fedsweep("merge", results, "--results", tmp_path / "merged")
    assert code == 0, err
    assert "\x1b" not in (tmp_path / "merged" / "study.yaml").read_text()
