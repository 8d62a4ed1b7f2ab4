"""Storage that hangs, is read-only, or changes a digit: nothing that was finished is lost, and
the results are those of an undisturbed run."""

import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import chaos
import pytest
from chaos import Driver, Left

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


# ---- storage that hangs

HANGS_S = 900.0


def test_a_storage_that_hangs_delays_no_pack(folder, undisturbed, tally):
    """The study ends while the first checkpoint is still being written."""
    with Driver.run(folder, chaos.study(), checkpoint_every_s=0.1, storage_hangs_s=HANGS_S) as driver:
        assert driver.end() == 0, f"{driver.said}\n{chaos.log(folder)}"
    tally.add("storage hangs", "coarse")
    assert Left.of(folder) == undisturbed
    took = [float(seconds) for seconds in re.findall(r"trials ended after (\S+) s", chaos.log(folder))]
    print({"longest_pack_s": max(took)})
    assert max(took) < HANGS_S / 3
    assert driver.left_behind() == []


# ---- a changed digit


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


# ---- a folder that cannot be written


def test_a_results_folder_that_is_read_only(folder, undisturbed, tmp_path, tally):
    """As on a mounted archive. Everything that only reads works, and the others name the folder and what helps."""
    run_alone(folder, chaos.study())
    program = f"{sys.executable} -c 'from orchestrator.cli import main; main()'"
    script = f'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 77; shift; {program} "$@"'

    def read_only(*arguments: str) -> tuple[int, str, str]:
        namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", str(folder)]
        environment = {**chaos.ENVIRONMENT, "COLUMNS": "500"}
        done = subprocess.run([*namespace, *arguments], capture_output=True, text=True, env=environment)
        return done.returncode, done.stdout, done.stderr.strip()

    if read_only("--version")[0] == 77:
        pytest.skip("this user cannot mount a folder")
    for command in ("best", "status", "check"):
        code, _, err = read_only(command, str(folder))
        assert (code, err) == (0, ""), command
    for command, option, place in (("report", "--output", "page.html"), ("export", "--out", "export")):
        code, _, err = read_only(command, str(folder))
        assert code == 2
        file = folder / {"report": "report.html", "export": "export"}[command]
        assert err == f"fedsweep: {file} cannot be written: Read-only file system; choose another place with {option}."
        assert read_only(command, str(folder), option, str(tmp_path / place))[0] == 0
        assert (tmp_path / place).exists()
    code, _, err = read_only("tables", str(folder))
    assert code == 2
    assert err.startswith(f"fedsweep: results folder {folder} cannot be written: [Errno 30] Read-only file system: ")
    assert err.endswith("; run the same command again once it can be written.")
    code, _, err = read_only("resume", str(folder))
    assert code == 2
    assert f"results folder {folder} cannot be" in err
    tally.add("folder is read-only", "elsewhere")
    assert Left.of(folder) == undisturbed
