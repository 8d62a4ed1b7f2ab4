"""The ledger's contract: rows are durable and unique across crashes; one writer, any number of readers."""

import contextlib
import dataclasses
import fcntl
import math
import os
import re
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import small

from orchestrator.results import checks, status
from orchestrator.results import ledger as ledgers
from orchestrator.results.ledger import Ledger, Row, SettingFacts
from orchestrator.study.cell_id import CellId, SettingId
from trainables.errors import UserError

ROW = Row(
    key="k",
    spec="{}",
    state="done",
    reason="",
    rounds=10,
    accuracy=50.0,
    loss=1.5,
    metrics={"accuracy": {5: 40.0, 10: 50.0}, "loss": {5: 2.0, 10: 1.5}},
    epsilon_claimed=1.0,
    epsilon_local=1.0,
    epsilon_secure=0.25,
    epsilon_unsampled=0.5,
    seconds=0.5,
    correct=b"\x00\xff\x80",
)

CELL = CellId("toy", "iid", "dp-fedgd", 8.0)
OTHER = CELL._replace(epsilon=1.0)


@pytest.fixture(autouse=True)
def short_keys(monkeypatch):
    """Trials are called a, b, c here, and have no specification."""
    monkeypatch.setattr(checks, "KEY", re.compile(".+"))
    monkeypatch.setattr(checks, "spec", checks.text)


def row(key: str, **changes) -> Row:
    return dataclasses.replace(ROW, key=key, **changes)


# ---- rows


def test_the_score_of_a_row_by_metric():
    """From the metric's column, or else its value after the last round; None unless the trial is done."""
    done = row("a", rounds=20, accuracy=71.0, loss=0.4, metrics={"squared_error": {10: 3.0, 20: 2.0}})
    assert [done.score(metric) for metric in ("accuracy", "loss", "squared_error", "other")] == [71.0, 0.4, 2.0, None]
    assert dataclasses.replace(done, state="diverged").score("squared_error") is None


def test_scores_of_any_metric_are_read_back(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a", rounds=20, accuracy=71.0, loss=0.4, metrics={"squared_error": {20: 2.0}})])
        outcomes = {metric: ledger.outcomes(metric)["a"] for metric in ("accuracy", "loss", "squared_error")}
    assert outcomes == {
        "accuracy": ("done", 71.0, 0.4),
        "loss": ("done", 0.4, 0.4),
        "squared_error": ("done", 2.0, 0.4),
    }


def test_sessions_record_the_time_and_size_of_batches(tmp_path, monkeypatch):
    """For every session: the time, number of trials and number of rounds of each batch."""
    clock = iter([100.0, 107.0, 109.0, 111.0, 200.0])
    monkeypatch.setattr(ledgers.time, "time", lambda: next(clock))
    with Ledger.write(tmp_path) as ledger:
        ledger.begin_session()
        ledger.add([row("a", rounds=10), row("b", rounds=20)])
        ledger.add([row("c", rounds=5)])
        ledger.add([row("d", rounds=6)])
        ledger.begin_session()
        first, second = ledger.sessions()
    assert (first.began, first.last, first.computed) == (100.0, 111.0, 4)
    assert first.batches == [(107.0, 2, 30), (109.0, 1, 5), (111.0, 1, 6)]
    assert (second.began, second.batches, second.last, second.computed) == (200.0, [], 200.0, 0)


def test_more_rows_than_fit_one_query(tmp_path):
    keys = [f"{number:04}" for number in range(2 * ledgers.KEYS_PER_QUERY + 3)]
    with Ledger.write(tmp_path) as ledger:
        ledger.add(row(key, accuracy=float(key) / 100) for key in keys)
        rows = ledger.rows(reversed(keys))
    assert list(rows) == keys[::-1]
    assert all(rows[key].accuracy == float(key) / 100 for key in keys)


def test_rows_are_read_back_unchanged(tmp_path):
    rows = [
        row("a"),
        row("b", state="diverged", accuracy=None, loss=None, metrics={"loss": {5: math.inf}}, rounds=5, correct=b""),
        row("c", state="failed", reason="RuntimeError: 'ünglück'; \"quoted\"", accuracy=None, loss=None, metrics={}),
        row("d", state="diverged", accuracy=None, loss=None, epsilon_claimed=math.inf, epsilon_local=math.inf),
    ]
    with Ledger.write(tmp_path) as ledger:
        ledger.add(rows)
        assert ledger.rows("abcd") == {r.key: r for r in rows}
    with Ledger.read(tmp_path) as ledger:
        assert ledger.rows("abcd") == {r.key: r for r in rows}
        assert ledger.outcomes() == {
            "a": ("done", 50.0, 1.5),
            "b": ("diverged", None, None),
            "c": ("failed", None, None),
            "d": ("diverged", None, None),
        }


def test_numbers_are_read_back_exactly(tmp_path):
    numbers = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, 2 / 3 * 100]
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a", accuracy=numbers[0], metrics={"loss": dict(enumerate(numbers))})])
    with Ledger.read(tmp_path) as ledger:
        stored = ledger.rows(["a"])["a"]
    assert stored.accuracy == numbers[0]
    assert list(stored.metrics["loss"].values()) == numbers


def test_a_trial_is_read_back_with_its_key(tmp_path, small_problem):
    trial = small.trial(small_problem, "dp-fedsofim", {"bias_correction": True, "rho": 1})
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row(trial.key, spec=trial.model_dump_json())])
        stored = ledger.rows([trial.key])[trial.key].trial
    assert stored == trial
    assert stored.key == trial.key


def test_rows_returns_only_trials_that_have_ended(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a")])
        assert list(ledger.rows(["a", "b"])) == ["a"]
        assert ledger.rows([]) == {}


def test_adding_a_row_again_changes_nothing(tmp_path):
    """Not even with other content: the first result is kept."""
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a"), row("b")])
        ledger.add([row("a", accuracy=99.0, state="failed"), row("c")])
        ledger.add([row("c", accuracy=99.0), row("c", accuracy=98.0)])
        assert ledger.rows("abc") == {"a": row("a"), "b": row("b"), "c": row("c")}


def test_a_failed_row_is_replaced_completely(tmp_path):
    """No column of the failed row is left. Columns that follow from the key cannot differ."""
    retried = {
        **{"state": "done", "reason": "second try", "rounds": 9, "accuracy": 51.0, "loss": 1.25},
        **{"metrics": {"accuracy": {9: 51.0}}, "epsilon_local": 0.9, "epsilon_secure": 0.2, "epsilon_unsampled": 0.6},
        **{"seconds": 0.75, "correct": b"\x0f"},
    }
    assert {field.name for field in dataclasses.fields(Row)} - set(retried) == {"key", "spec", "epsilon_claimed"}
    assert all(getattr(ROW, name) != value for name, value in retried.items() if name != "state")
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a", state="failed")])
        ledger.add([row("a", **retried)])
        assert ledger.rows("a") == {"a": row("a", **retried)}
        ledger.add([row("a", state="failed")])
        assert ledger.rows("a") == {"a": row("a", **retried)}, "a finished row is final"


def test_a_batch_is_added_completely_or_not_at_all(tmp_path):
    def rows():
        yield row("b")
        raise RuntimeError("in mid-batch")

    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a")])
        with pytest.raises(RuntimeError, match="in mid-batch"):
            ledger.add(rows())
        assert list(ledger.outcomes()) == ["a"]
        ledger.add([row("c")])
        assert list(ledger.outcomes()) == ["a", "c"], "the ledger keeps working"


@pytest.mark.parametrize("changes", [{"state": "running"}, {"epsilon_local": math.nan}, {"seconds": None}])
def test_an_invalid_row_raises(tmp_path, changes):
    """The caller relies on added rows being stored: a silently dropped trial would run again forever."""
    with Ledger.write(tmp_path) as ledger:
        with pytest.raises((sqlite3.IntegrityError, UserError, ValueError)):
            ledger.add([row("good"), row("bad", **changes)])
        assert ledger.outcomes() == {}


# ---- other tables


def test_stages_keep_their_order_and_grow(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        ledger.add_stage(CELL, "grid", "coarse", ["z", "a", "m"])
        ledger.add_stage(CELL, "optuna", "optuna", ["p", "q"])
        ledger.add_stage(CELL, "optuna", "optuna", ["p"], start=2)
        ledger.add_stage(CELL, "grid", "coarse", ["other", "a", "m", "b"])
        assert ledger.stages() == {
            (CELL, "grid", "coarse"): ["z", "a", "m", "b"],
            (CELL, "optuna", "optuna"): ["p", "q", "p"],
        }


def test_the_latest_study_is_current_and_earlier_ones_are_kept(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        assert ledger.study() is None
        ledger.add_study("{1}", "one")
        ledger.add_study("{2}", "two")
        assert ledger.study() == ("{2}", "two")
        assert ledger._db.execute("SELECT count(*) FROM studies").fetchone() == (2,)


def test_a_data_label_cannot_change_its_content(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        ledger.add_data({"one": "sha256:1"})
        ledger.add_data({"one": "sha256:1", "two": "sha256:2"})
        with pytest.raises(UserError, match="data 'two' has other content than when this folder's study was run"):
            ledger.add_data({"three": "sha256:3", "two": "sha256:other"})
        assert dict(ledger._db.execute("SELECT * FROM data")) == {"one": "sha256:1", "two": "sha256:2"}


def test_rows_without_metrics_and_bits(tmp_path):
    """More rows than fit one query, in the order of the keys, unchanged except for metrics and bits."""
    names = [f"k{number}" for number in range(1100)]
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row(name, metrics={"accuracy": {10: 1.0}}, correct=b"x") for name in names])
        keys = ["missing", *reversed(names)]
        whole, brief = ledger.rows(keys), ledger.rows(keys, whole=False)
    assert list(whole) == list(brief) == names[::-1]
    assert whole["k7"].metrics == {"accuracy": {10: 1.0}}
    for name in names:
        assert dataclasses.replace(whole[name], metrics={}, correct=b"") == brief[name]


def test_setting_facts_and_failures(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        first, second = SettingId("x", "iid"), SettingId("y", "iid")
        ledger.add_settings({first: SettingFacts(10, 100, 5)})
        ledger.add_settings({first: SettingFacts(20, 200, 5), second: SettingFacts(30, 300, 5)})
        assert ledger.settings() == {first: SettingFacts(10, 100, 5), second: SettingFacts(30, 300, 5)}
        ledger.add_failure(["a", "b"], "first")
        ledger.add_failure(["a"], "second")
        assert ledger.failures() == [(2, "a", "first"), (1, "a", "second")]


def test_plugins_are_recorded_once_each(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        assert ledger.plugins() == []
        ledger.add_plugins(["b"], {"b": "1"})
        ledger.add_plugins(["a", "b"], {"a": "2", "b": "3"})
        assert ledger.plugins() == ["b", "a"]
        assert ledger.plugin_code() == {"b": "3", "a": "2"}


def test_a_transaction_in_another_is_undone_with_it(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        with contextlib.suppress(ZeroDivisionError), ledger.transaction():
            ledger.add_stage(CELL, "grid", "coarse", ["a"])
            assert ledger.stages()
            raise ZeroDivisionError
        assert not ledger.stages()
        ledger.add_stage(CELL, "grid", "coarse", ["a"])
    with Ledger.read(tmp_path) as ledger:
        assert ledger.stages()


def test_a_secret_has_256_bits_and_never_changes(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        first = ledger.secret(CELL, "").value
        assert len(first) == 32
        assert ledger.secret(CELL, "") == (first, True) != ledger.secret(OTHER, "")
        assert ledger.secrets() == {CELL: first, OTHER: ledger.secret(OTHER, "").value}


# ---- one writer, any number of readers


def test_a_second_writer_is_refused_with_the_name_of_the_holder(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(UserError, match=f"is in use by {holder}$"), Ledger.write(tmp_path):
            pass
        ledger.add([row("a")])
    with Ledger.write(tmp_path) as ledger:
        assert list(ledger.outcomes()) == ["a"]


def test_a_refused_writer_does_not_overwrite_the_holder_s_name(tmp_path):
    with Ledger.write(tmp_path):
        for _ in range(2):
            with pytest.raises(UserError, match=f"process {os.getpid()} "), Ledger.write(tmp_path):
                pass


def test_a_holder_that_has_not_written_its_name(tmp_path):
    """The state between taking the lock and writing the name."""
    with (tmp_path / "ledger.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"is in use by another process$"), Ledger.write(tmp_path):
            pass


def test_the_lock_file_is_readable_by_all_and_writable_by_its_owner(tmp_path):
    before = os.umask(0)
    try:
        with Ledger.write(tmp_path):
            assert stat.S_IMODE((tmp_path / "ledger.lock").stat().st_mode) == 0o644
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("writable", "free", "has_writer", "immutable"),
    [
        (True, 2**16 + 1, False, False),
        (True, 2**16, False, True),  # a reader's index may need this much
        (False, 2**40, False, True),
        (False, 2**40, True, False),  # the writer has made the index
    ],
)
def test_a_ledger_is_read_as_immutable_where_no_index_can_be_made(
    tmp_path, monkeypatch, writable, free, has_writer, immutable
):
    connect, opened = ledgers._connect, []
    with Ledger.write(tmp_path):
        pass
    monkeypatch.setattr(ledgers.os, "access", lambda *_: writable)
    monkeypatch.setattr(ledgers.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with Ledger.write(tmp_path) if has_writer else nullcontext():
        monkeypatch.setattr(ledgers, "_connect", lambda uri, folder: (opened.append(uri), connect(uri, folder))[1])
        with Ledger.read(tmp_path) as ledger:
            assert ledger.outcomes() == {}
    assert ["immutable" in uri for uri in opened] == [immutable]


def test_the_lock_is_released_when_the_block_fails(tmp_path):
    with pytest.raises(RuntimeError), Ledger.write(tmp_path):
        raise RuntimeError
    with Ledger.write(tmp_path):
        pass


def test_a_reader_cannot_write(tmp_path):
    with Ledger.write(tmp_path):
        pass
    with Ledger.read(tmp_path) as ledger, pytest.raises(sqlite3.OperationalError, match="readonly"):
        ledger.add([row("a")])


def test_a_reader_has_a_consistent_view_and_blocks_no_writer(tmp_path):
    with Ledger.write(tmp_path) as writer, Ledger.read(tmp_path) as reader:
        writer.add([row("a")])
        with reader._db:
            reader._db.execute("BEGIN")
            assert list(reader.outcomes()) == ["a"]
            writer.add([row("b")])
            assert list(reader.outcomes()) == ["a"]
        assert list(reader.outcomes()) == ["a", "b"]


def test_a_ledger_can_be_read_while_it_is_written(tmp_path):
    """Readers see only complete batches, and the number of rows never decreases."""
    batch, batches = 50, 40
    counts: list[int] = []
    with Ledger.write(tmp_path) as ledger:
        started, finished = threading.Event(), threading.Event()

        def watch() -> None:
            while not finished.is_set():
                with Ledger.read(tmp_path) as reader:
                    counts.append(len(reader.outcomes()))
                started.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        started.wait()
        try:
            for number in range(batches):
                ledger.add([row(f"{number}/{k}") for k in range(batch)])
        finally:
            finished.set()
            watcher.join()
        with Ledger.read(tmp_path) as reader:
            assert len(reader.outcomes()) == batch * batches
    assert all(count % batch == 0 for count in counts)
    assert counts == sorted(counts)


def test_status_names_the_running_process(tmp_path):
    assert status.holder(tmp_path) is None, "no lock yet"
    with Ledger.write(tmp_path):
        assert status.holder(tmp_path) == f"process {os.getpid()} on {socket.gethostname()}"
    assert status.holder(tmp_path) is None


# ---- crashes


WRITER = """
import dataclasses
from pathlib import Path
from orchestrator.results.ledger import Ledger, Row
template = {row!r}
with Ledger.write(Path({folder!r})) as ledger:
    print("ready", flush=True)
    for number in range(10**6):
        ledger.add([dataclasses.replace(template, key=f"{{number}}/{{k}}") for k in range({batch})])
        print(number, flush=True)
"""


@contextmanager
def another_writer(folder: Path, batch: int):
    """A process that adds batches of rows forever and prints the number of each."""
    code = WRITER.format(row=ROW, folder=str(folder), batch=batch)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("acknowledged", [1, 17, 200])
def test_kill_9_loses_no_acknowledged_batch(tmp_path, acknowledged):
    """After a kill during writing, the rows of every printed batch are stored, no batch is stored in part, and the dead
    process's lock does not block the next writer."""
    batch = 7
    with another_writer(tmp_path, batch) as process:
        for _ in range(acknowledged):
            last = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        later = [int(line) for line in process.stdout.read().split("\n")[:-1]]
        last = max([last, *later])
    with Ledger.read(tmp_path) as ledger:
        stored = ledger.outcomes()
    assert {f"{number}/{k}" for number in range(last + 1) for k in range(batch)} <= set(stored)
    assert len(stored) % batch == 0
    with Ledger.write(tmp_path) as ledger:
        assert ledger.outcomes() == stored
        ledger.add([row("after")])
        assert ledger._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_another_process_holds_the_folder_until_it_dies(tmp_path):
    with another_writer(tmp_path, 1) as process:
        with pytest.raises(UserError, match=f"in use by process {process.pid} on "), Ledger.write(tmp_path):
            pass
        with Ledger.read(tmp_path) as ledger:
            assert ledger.study() is None, "readers are not blocked"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with Ledger.write(tmp_path):
            pass


def test_child_processes_do_not_inherit_the_lock(tmp_path):
    """Ray's processes outlive a killed driver for a while."""
    code = "print('ready', flush=True); input()"
    with Ledger.write(tmp_path):
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, close_fds=False
        )
        assert child.stdout.readline() == "ready\n"
    try:
        with Ledger.write(tmp_path):
            pass
    finally:
        child.communicate("\n")


def test_a_full_disk_loses_nothing(tmp_path):
    """A limit on the file's pages simulates a full disk; the ledger continues once there is space again."""
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a")])
        pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
        ledger._db.execute(f"PRAGMA max_page_count={pages + 5}")
        with pytest.raises((sqlite3.OperationalError, UserError), match="full"):
            ledger.add([row(str(k), correct=b"x" * 4000) for k in range(100)])
        assert list(ledger.outcomes()) == ["a"]
        ledger._db.execute("PRAGMA max_page_count=100000")
        ledger.add([row("b")])
        assert list(ledger.outcomes()) == ["a", "b"]


# ---- missing and damaged ledgers


def test_a_folder_without_a_ledger_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no ledger\.sqlite$"), Ledger.read(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == [], "reading creates no file"


def test_a_folder_that_cannot_be_created(tmp_path):
    file = tmp_path / "file"
    file.write_text("here")
    for folder in (file, file / "below"):
        with pytest.raises(UserError, match=r"^results folder .*file.* cannot be made: "), Ledger.write(folder):
            pass


def test_parent_folders_with_any_name_are_created(tmp_path):
    folder = tmp_path / "50% of it?" / "a#b" / "ü"
    with Ledger.write(folder) as ledger:
        ledger.add([row("a")])
    assert (folder / "ledger.sqlite").is_file()
    with Ledger.read(folder) as ledger:
        assert list(ledger.outcomes()) == ["a"]


@pytest.mark.parametrize("open_ledger", [Ledger.read, Ledger.write])
def test_a_ledger_of_another_version_is_refused(tmp_path, monkeypatch, open_ledger):
    with monkeypatch.context() as patch:
        patch.setattr(ledgers, "SCHEMA_VERSION", "another")
        with Ledger.write(tmp_path) as ledger:
            ledger.add([row("a")])
    sentence = f"has version another, this program reads {ledgers.SCHEMA_VERSION}; run the study in a new folder$"
    with pytest.raises(UserError, match=sentence), open_ledger(tmp_path):
        pass
    monkeypatch.setattr(ledgers, "SCHEMA_VERSION", "another")
    with Ledger.read(tmp_path) as ledger:
        assert list(ledger.outcomes()) == ["a"], "the refusal changed nothing"


def test_the_error_for_a_damaged_trial_has_one_line(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a", spec="{}")])
    damaged = "the specification of trial a is damaged: problem: Field required$"
    with pytest.raises(UserError, match=damaged), Ledger.read(tmp_path) as ledger:
        ledger.rows("a")["a"].trial  # noqa: B018


@pytest.mark.parametrize("open_ledger", [Ledger.read, Ledger.write])
def test_a_file_that_is_not_a_database_is_refused_and_unchanged(tmp_path, open_ledger):
    content = b"this is not a database" * 100
    (tmp_path / "ledger.sqlite").write_bytes(content)
    with (
        pytest.raises(UserError, match=r"^the ledger in .* cannot be opened: file is not a database$"),
        open_ledger(tmp_path),
    ):
        pass
    assert (tmp_path / "ledger.sqlite").read_bytes() == content


def test_an_empty_ledger_file_is_refused_for_reading_and_filled_by_a_writer(tmp_path):
    """A driver killed at its start may leave an empty file."""
    (tmp_path / "ledger.sqlite").touch()
    with pytest.raises(UserError), Ledger.read(tmp_path):
        pass
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a")])


@pytest.mark.parametrize("open_ledger", [Ledger.read, Ledger.write])
def test_a_truncated_ledger_is_refused(tmp_path, open_ledger):
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row(str(k), correct=b"x" * 1000) for k in range(200)])
    file = tmp_path / "ledger.sqlite"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=r"^the ledger in "), open_ledger(tmp_path) as ledger:
        ledger.outcomes()


def test_sessions_count_the_trials_they_computed(tmp_path):
    """A trial belongs to the session that added it first; a failed trial to the session that completed it."""
    with Ledger.write(tmp_path) as ledger:
        ledger.begin_session({"device": "cpu", "kernel": "compiled"})
        ledger.add([row("a"), row("b", state="failed", accuracy=None)])
        ledger.begin_session({"device": "cuda"})
        ledger.add([row("a"), row("b"), row("c")])
        first, second = ledger.sessions()
    assert (first.environment, first.computed) == ({"device": "cpu", "kernel": "compiled"}, 1)
    assert (second.environment, second.computed) == ({"device": "cuda"}, 2)


def test_copying_rows_keeps_their_sessions(tmp_path):
    """Each row is copied once; a row that both ledgers have belongs to the session copied first."""
    for name, device, keys in (("one", "cpu", "ab"), ("two", "cuda", "bc")):
        with Ledger.write(tmp_path / name) as ledger:
            ledger.begin_session({"device": device})
            ledger.add([row(key) for key in keys])
    with Ledger.write(tmp_path / "both") as into:
        for name in ("one", "two", "one"):
            with Ledger.read(tmp_path / name) as part:
                into.copy_rows(part)
        with Ledger.write(tmp_path / "two") as two:
            two.add([row("d")])  # added since the last copy
            into.copy_rows(two)
        into.recount()
        sessions = into.sessions()
        assert set(into.outcomes()) == {"a", "b", "c", "d"}
    assert [(session.environment["device"], session.computed) for session in sessions] == [("cpu", 2), ("cuda", 2)]
    assert [sum(trials for _, trials, _ in session.batches) for session in sessions] == [2, 3]
