"""The ledger's contract: what was added is there, once, whoever dies; one writes, anyone reads."""

import dataclasses
import fcntl
import math
import os
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

from orchestrator.results import ledger as ledgers
from orchestrator.results import status
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


def row(key: str, **changes) -> Row:
    return dataclasses.replace(ROW, key=key, **changes)


# ---- rows


def test_the_score_is_what_was_asked_for():
    """By its column, or else the metric after the last round; of a trial that did not end there is none."""
    whole = row("a", rounds=20, accuracy=71.0, loss=0.4, metrics={"squared_error": {10: 3.0, 20: 2.0}})
    assert [whole.score(metric) for metric in ("accuracy", "loss", "squared_error", "other")] == [71.0, 0.4, 2.0, None]
    assert dataclasses.replace(whole, state="diverged").score("squared_error") is None


def test_scores_of_any_metric_are_read_back(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a", rounds=20, accuracy=71.0, loss=0.4, metrics={"squared_error": {20: 2.0}})])
        found = {metric: ledger.outcomes(metric)["a"] for metric in ("accuracy", "loss", "squared_error")}
    assert found == {"accuracy": ("done", 71.0, 0.4), "loss": ("done", 0.4, 0.4), "squared_error": ("done", 2.0, 0.4)}


def test_when_what_was_handed_in(tmp_path, monkeypatch):
    """By driver: the time, how many trials, and how many rounds those had."""
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


def test_more_rows_than_one_question_holds(tmp_path):
    keys = [f"{number:04}" for number in range(2 * ledgers.KEYS_PER_QUERY + 3)]
    with Ledger.write(tmp_path) as ledger:
        ledger.add(row(key, accuracy=float(key)) for key in keys)
        found = ledger.rows(reversed(keys))
    assert list(found) == keys[::-1]
    assert all(found[key].accuracy == float(key) for key in keys)


def test_what_was_added_is_read_back_whole(tmp_path):
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


def test_numbers_come_back_to_the_last_bit(tmp_path):
    numbers = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, 2 / 3 * 100]
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a", accuracy=numbers[0], metrics={"loss": dict(enumerate(numbers))})])
    with Ledger.read(tmp_path) as ledger:
        found = ledger.rows(["a"])["a"]
    assert found.accuracy == numbers[0]
    assert list(found.metrics["loss"].values()) == numbers


def test_the_trial_comes_back_with_its_key(tmp_path, small_problem):
    trial = small.trial(small_problem, "dp-fedsofim", {"bias_correction": True, "rho": 1})
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row(trial.key, spec=trial.model_dump_json())])
        found = ledger.rows([trial.key])[trial.key].trial
    assert found == trial
    assert found.key == trial.key


def test_rows_gives_only_what_has_ended(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a")])
        assert list(ledger.rows(["a", "b"])) == ["a"]
        assert ledger.rows([]) == {}


def test_adding_again_changes_nothing(tmp_path):
    """Not even with other content: the first result stands."""
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a"), row("b")])
        ledger.add([row("a", accuracy=99.0, state="failed"), row("c")])
        ledger.add([row("c", accuracy=99.0), row("c", accuracy=98.0)])
        assert ledger.rows("abc") == {"a": row("a"), "b": row("b"), "c": row("c")}


def test_what_failed_is_replaced_whole(tmp_path):
    """Not one column of the failure is left: neither a score nor an epsilon nor a bit. What follows from the key alone
    cannot differ."""
    other = {
        **{"state": "done", "reason": "second try", "rounds": 9, "accuracy": 51.0, "loss": 1.25},
        **{"metrics": {"accuracy": {9: 51.0}}, "epsilon_local": 0.9, "epsilon_secure": 0.2, "epsilon_unsampled": 0.6},
        **{"seconds": 0.75, "correct": b"\x0f"},
    }
    assert {field.name for field in dataclasses.fields(Row)} - set(other) == {"key", "spec", "epsilon_claimed"}
    assert all(getattr(ROW, name) != value for name, value in other.items() if name != "state")
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a", state="failed")])
        ledger.add([row("a", **other)])
        assert ledger.rows("a") == {"a": row("a", **other)}
        ledger.add([row("a", state="failed")])
        assert ledger.rows("a") == {"a": row("a", **other)}, "and then it is final"


def test_all_or_none(tmp_path):
    def rows():
        yield row("b")
        raise RuntimeError("half way")

    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a")])
        with pytest.raises(RuntimeError, match="half way"):
            ledger.add(rows())
        assert list(ledger.outcomes()) == ["a"]
        ledger.add([row("c")])
        assert list(ledger.outcomes()) == ["a", "c"], "and it goes on working"


@pytest.mark.parametrize("changes", [{"state": "running"}, {"epsilon_local": math.nan}, {"seconds": None}])
def test_a_row_that_is_no_result_is_not_passed_over_in_silence(tmp_path, changes):
    """The caller takes it that what it added is there: a trial dropped here would be run again for ever."""
    with Ledger.write(tmp_path) as ledger:
        with pytest.raises((sqlite3.IntegrityError, UserError, ValueError)):
            ledger.add([row("good"), row("bad", **changes)])
        assert ledger.outcomes() == {}


# ---- the rest of what it keeps


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


def test_the_last_study_counts_and_the_others_are_kept(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        assert ledger.study() is None
        ledger.add_study("{1}", "one")
        ledger.add_study("{2}", "two")
        assert ledger.study() == ("{2}", "two")
        assert ledger._db.execute("SELECT count(*) FROM studies").fetchone() == (2,)


def test_a_data_label_never_changes_its_meaning(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        ledger.add_data({"one": "sha256:1"})
        ledger.add_data({"one": "sha256:1", "two": "sha256:2"})
        with pytest.raises(UserError, match="data 'two' has other content than when this folder's study was run"):
            ledger.add_data({"three": "sha256:3", "two": "sha256:other"})
        assert dict(ledger._db.execute("SELECT * FROM data")) == {"one": "sha256:1", "two": "sha256:2"}


def test_rows_without_their_bulk(tmp_path):
    """More of them than are asked for at once, in the order of the keys, each as it was but for metrics and bits."""
    names = [f"k{number}" for number in range(1100)]
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row(name, metrics={"accuracy": {10: 1.0}}, correct=b"x") for name in names])
        wanted = ["missing", *reversed(names)]
        whole, brief = ledger.rows(wanted), ledger.rows(wanted, whole=False)
    assert list(whole) == list(brief) == names[::-1]
    assert whole["k7"].metrics == {"accuracy": {10: 1.0}}
    for name in names:
        assert dataclasses.replace(whole[name], metrics={}, correct=b"") == brief[name]


def test_facts_and_failures(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        one, two = SettingId("x", "iid"), SettingId("y", "iid")
        ledger.add_settings({one: SettingFacts(10, 100, 5)})
        ledger.add_settings({one: SettingFacts(20, 200, 5), two: SettingFacts(30, 300, 5)})
        assert ledger.settings() == {one: SettingFacts(10, 100, 5), two: SettingFacts(30, 300, 5)}
        ledger.add_failure(["a", "b"], "first")
        ledger.add_failure(["a"], "second")
        assert ledger.failures() == [(2, "a", "first"), (1, "a", "second")]


def test_plugins_are_remembered_once_each(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        assert ledger.plugins() == []
        ledger.add_plugins(["b"])
        ledger.add_plugins(["a", "b"])
        assert ledger.plugins() == ["b", "a"]


def test_a_secret_has_256_bits_and_stays(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        first = ledger.secret(CELL)
        assert len(first) == 32
        assert ledger.secret(CELL) == first != ledger.secret(OTHER)
        assert ledger.secrets() == {CELL: first, OTHER: ledger.secret(OTHER)}


# ---- one writes, any number reads


def test_a_second_writer_is_refused_and_told_who_holds_the_folder(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        who = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(UserError, match=f"is in use by {who}$"), Ledger.write(tmp_path):
            pass
        ledger.add([row("a")])
    with Ledger.write(tmp_path) as ledger:
        assert list(ledger.outcomes()) == ["a"]


def test_a_refused_writer_leaves_the_holder_s_name(tmp_path):
    with Ledger.write(tmp_path):
        for _ in range(2):
            with pytest.raises(UserError, match=f"process {os.getpid()} "), Ledger.write(tmp_path):
                pass


def test_a_holder_without_a_name(tmp_path):
    """Between taking the lock and saying who it is."""
    with (tmp_path / "ledger.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"is in use by another process$"), Ledger.write(tmp_path):
            pass


def test_anyone_may_read_who_holds_a_folder_and_its_owner_alone_may_take_it(tmp_path):
    before = os.umask(0)
    try:
        with Ledger.write(tmp_path):
            assert stat.S_IMODE((tmp_path / "ledger.lock").stat().st_mode) == 0o644
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("allowed", "free", "written", "alone"),
    [
        (True, 2**16 + 1, False, False),
        (True, 2**16, False, True),  # a reader's index may need that much
        (False, 2**40, False, True),
        (False, 2**40, True, False),  # whoever writes has made the index
    ],
)
def test_a_ledger_is_read_as_it_is_where_no_index_can_be_made(tmp_path, monkeypatch, allowed, free, written, alone):
    plain, opened = ledgers._connect, []
    with Ledger.write(tmp_path):
        pass
    monkeypatch.setattr(ledgers.os, "access", lambda *given: allowed)
    monkeypatch.setattr(ledgers.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with Ledger.write(tmp_path) if written else nullcontext():
        monkeypatch.setattr(ledgers, "_connect", lambda uri, folder: (opened.append(uri), plain(uri, folder))[1])
        with Ledger.read(tmp_path) as ledger:
            assert ledger.outcomes() == {}
    assert ["immutable" in uri for uri in opened] == [alone]


def test_the_lock_is_let_go_when_the_block_fails(tmp_path):
    with pytest.raises(RuntimeError), Ledger.write(tmp_path):
        raise RuntimeError
    with Ledger.write(tmp_path):
        pass


def test_a_reader_does_not_write(tmp_path):
    with Ledger.write(tmp_path):
        pass
    with Ledger.read(tmp_path) as ledger, pytest.raises(sqlite3.OperationalError, match="readonly"):
        ledger.add([row("a")])


def test_a_reader_keeps_what_it_began_with_and_keeps_nobody_waiting(tmp_path):
    with Ledger.write(tmp_path) as writer, Ledger.read(tmp_path) as reader:
        writer.add([row("a")])
        with reader._db:
            reader._db.execute("BEGIN")
            assert list(reader.outcomes()) == ["a"]
            writer.add([row("b")])
            assert list(reader.outcomes()) == ["a"]
        assert list(reader.outcomes()) == ["a", "b"]


def test_it_can_be_read_while_it_is_written(tmp_path):
    """Whoever looks sees every batch whole, and never less than before."""
    batch, batches = 50, 40
    seen: list[int] = []
    with Ledger.write(tmp_path) as ledger:
        started, finished = threading.Event(), threading.Event()

        def watch() -> None:
            while not finished.is_set():
                with Ledger.read(tmp_path) as reader:
                    seen.append(len(reader.outcomes()))
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
    assert all(count % batch == 0 for count in seen)
    assert seen == sorted(seen)


def test_status_says_who_is_running(tmp_path):
    assert status.holder(tmp_path) is None, "there is no lock yet"
    with Ledger.write(tmp_path):
        assert status.holder(tmp_path) == f"process {os.getpid()} on {socket.gethostname()}"
    assert status.holder(tmp_path) is None


# ---- who dies


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
    """A process that adds batches of rows for ever, and says so after each."""
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
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path, acknowledged):
    """Killed while it goes on writing; the rows of every batch that was printed are there, and no batch is there in
    part. The dead process's lock blocks nobody."""
    batch = 7
    with another_writer(tmp_path, batch) as process:
        for _ in range(acknowledged):
            last = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        rest = [int(line) for line in process.stdout.read().split("\n")[:-1]]
        last = max([last, *rest])
    with Ledger.read(tmp_path) as ledger:
        before = ledger.outcomes()
    assert {f"{number}/{k}" for number in range(last + 1) for k in range(batch)} <= set(before)
    assert len(before) % batch == 0
    with Ledger.write(tmp_path) as ledger:
        assert ledger.outcomes() == before
        ledger.add([row("after")])
        assert ledger._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_another_process_holds_the_folder_until_it_dies(tmp_path):
    with another_writer(tmp_path, 1) as process:
        with pytest.raises(UserError, match=f"in use by process {process.pid} on "), Ledger.write(tmp_path):
            pass
        with Ledger.read(tmp_path) as ledger:
            assert ledger.study() is None, "but anyone may read"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with Ledger.write(tmp_path):
            pass


def test_the_lock_does_not_pass_to_child_processes(tmp_path):
    """Ray's processes outlive a killed driver by a while."""
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
    """The pages that the file may have stand for the disk; once there is room again the ledger goes on."""
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


# ---- what is no ledger


def test_a_folder_without_a_ledger(tmp_path):
    with pytest.raises(UserError, match=r"holds no ledger\.sqlite$"), Ledger.read(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == [], "looking leaves nothing behind"


def test_a_folder_that_cannot_be_made(tmp_path):
    file = tmp_path / "file"
    file.write_text("here")
    for folder in (file, file / "below"):
        with pytest.raises(UserError, match=r"^results folder .*file.* cannot be made: "), Ledger.write(folder):
            pass


def test_folders_are_made_on_the_way_whatever_their_names(tmp_path):
    folder = tmp_path / "50% of it?" / "a#b" / "ü"
    with Ledger.write(folder) as ledger:
        ledger.add([row("a")])
    assert (folder / "ledger.sqlite").is_file()
    with Ledger.read(folder) as ledger:
        assert list(ledger.outcomes()) == ["a"]


@pytest.mark.parametrize("way", [Ledger.read, Ledger.write])
def test_a_ledger_of_another_version_is_refused(tmp_path, monkeypatch, way):
    with monkeypatch.context() as patch:
        patch.setattr(ledgers, "SCHEMA_VERSION", "another")
        with Ledger.write(tmp_path) as ledger:
            ledger.add([row("a")])
    sentence = f"has version another, this program reads {ledgers.SCHEMA_VERSION}; run the study in a new folder$"
    with pytest.raises(UserError, match=sentence), way(tmp_path):
        pass
    monkeypatch.setattr(ledgers, "SCHEMA_VERSION", "another")
    with Ledger.read(tmp_path) as ledger:
        assert list(ledger.outcomes()) == ["a"], "refusing has changed nothing"


def test_of_what_is_wrong_with_a_trial_the_first_line_is_said(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a", spec="{}")])
    damaged = r"is damaged: \d+ validation errors for TrialSpec$"
    with pytest.raises(UserError, match=damaged), Ledger.read(tmp_path) as ledger:
        ledger.rows("a")["a"].trial  # noqa: B018


@pytest.mark.parametrize("way", [Ledger.read, Ledger.write])
def test_what_is_not_a_database_is_refused_and_left_alone(tmp_path, way):
    content = b"this is not a database" * 100
    (tmp_path / "ledger.sqlite").write_bytes(content)
    with pytest.raises(UserError, match=r"^the ledger in .* cannot be opened: file is not a database$"), way(tmp_path):
        pass
    assert (tmp_path / "ledger.sqlite").read_bytes() == content


def test_a_ledger_that_is_only_just_being_made(tmp_path):
    """A driver killed at once may leave an empty file; whoever looks is told so, and the next driver fills it."""
    (tmp_path / "ledger.sqlite").touch()
    with pytest.raises(UserError), Ledger.read(tmp_path):
        pass
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row("a")])


@pytest.mark.parametrize("way", [Ledger.read, Ledger.write])
def test_a_cut_off_ledger_is_refused_with_a_sentence(tmp_path, way):
    with Ledger.write(tmp_path) as ledger:
        ledger.add([row(str(k), correct=b"x" * 1000) for k in range(200)])
    file = tmp_path / "ledger.sqlite"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=r"^the ledger in "), way(tmp_path) as ledger:
        ledger.outcomes()


def test_who_computed_what(tmp_path):
    """A trial belongs to the driver that handed it in first; one that failed, to whoever got it done."""
    with Ledger.write(tmp_path) as ledger:
        ledger.begin_session({"device": "cpu", "kernel": "compiled"})
        ledger.add([row("a"), row("b", state="failed", accuracy=None)])
        ledger.begin_session({"device": "cuda"})
        ledger.add([row("a"), row("b"), row("c")])
        first, second = ledger.sessions()
    assert (first.environment, first.computed) == ({"device": "cpu", "kernel": "compiled"}, 1)
    assert (second.environment, second.computed) == ({"device": "cuda"}, 2)


def test_a_ledger_takes_over_who_computed_what_elsewhere(tmp_path):
    """Once, however often it is asked; of what both have, whoever was there first."""
    for name, device, keys in (("one", "cpu", "ab"), ("two", "cuda", "bc")):
        with Ledger.write(tmp_path / name) as ledger:
            ledger.begin_session({"device": device})
            ledger.add([row(key) for key in keys])
    with Ledger.write(tmp_path / "both") as into:
        for name in ("one", "two", "one"):
            with Ledger.read(tmp_path / name) as part:
                into.copy_rows(part)
        with Ledger.write(tmp_path / "two") as two:
            two.add([row("d")])  # it has gone on since
            into.copy_rows(two)
        found = into.sessions()
        assert set(into.outcomes()) == {"a", "b", "c", "d"}
    assert [(session.environment["device"], session.computed) for session in found] == [("cpu", 2), ("cuda", 2)]
    assert [sum(trials for _, trials, _ in session.batches) for session in found] == [2, 3]
