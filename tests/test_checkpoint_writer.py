"""Checkpoints are written in a thread; a storage that fails or hangs delays no round and is tried again."""

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from trainables.federation import checkpoint_writer, pack_runner
from trainables.federation.checkpoint_writer import CheckpointWriter
from trainables.federation.checkpoints import ENDING, checkpoint_name
from trainables.federation.messages import Order
from trainables.federation.pack_runner import PackRunner

KEYS = ["a", "b"]
NAME = checkpoint_name(KEYS)


@dataclass
class Storage:
    """Keeps checkpoints in memory. `fails`: how many writes fail; a write waits until `open` is set."""

    fails: int = 0
    attempts: int = 0
    saved: dict = field(default_factory=dict)
    open: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.open.set()

    def save(self, keys, t, checkpoint, ending):
        self.open.wait()
        self.attempts += 1
        if self.attempts <= self.fails:
            raise OSError("503 Slow Down")
        self.saved[checkpoint_name(keys)] = (t, checkpoint)

    def load(self, name, ending=ENDING):
        self.open.wait()
        return self.saved[name]

    def remove(self, name):
        self.saved.pop(name, None)


@pytest.fixture
def clock(monkeypatch):
    """The writer's clock, which only moves when a test moves it."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(checkpoint_writer, "time", made)
    return made


def written(writer: CheckpointWriter) -> None:
    """Wait for the write in progress."""
    if writer._write is not None:
        writer._write.join()
    writer.poll()


def writer_of(storage: Storage) -> CheckpointWriter:
    writer = CheckpointWriter(storage)
    writer.start_pack(KEYS)
    return writer


def test_one_storage_error_does_not_end_checkpoints(clock):
    """The attempts become rarer; the log has the first failure and the recovery."""
    storage = Storage(fails=2)
    writer, tried = writer_of(storage), []
    for second in range(1, 61):
        clock.now += 1
        before = storage.attempts
        writer.save_if_due(second, lambda: b"state")
        written(writer)
        if storage.attempts > before:
            tried.append(second)
    assert tried[:3] == [6, 17, 38], "after 5 s, then 10 s later, then 20 s later"
    assert (writer.saved, storage.saved[NAME]) == (NAME, (tried[-1], b"state"))
    first, again = writer.notes
    assert first.startswith("pack of 2 trials could not write a checkpoint: 503 Slow Down; packs continue without")
    assert again == "checkpoints can be written again, after 2 failed attempts"


def test_attempts_are_at_most_five_minutes_apart(clock):
    storage = Storage(fails=10**9)
    writer = writer_of(storage)
    for _ in range(3600):
        clock.now += 1
        writer.save_if_due(1, lambda: b"state")
        written(writer)
    assert 3600 / 301 < storage.attempts < 20
    assert len(writer.notes) == 1


def test_a_storage_that_hangs_delays_nothing_and_has_one_write_at_a_time(clock):
    storage, made = Storage(), []
    storage.open.clear()
    writer = writer_of(storage)
    for second in range(60):
        clock.now += 1
        writer.save_if_due(second, lambda second=second: made.append(second) or b"state")
    assert made == [5]
    assert writer.saved == "", "it is not written yet"
    storage.open.set()
    written(writer)
    assert (writer.saved, writer.saved_round) == (NAME, 5)


def test_a_write_that_outlives_its_pack_leaves_no_file(clock):
    storage = Storage()
    storage.open.clear()
    writer = writer_of(storage)
    clock.now += 6
    writer.save_if_due(3, lambda: b"state")
    writer.end_pack()
    write = writer._write
    writer.start_pack(["c"])
    storage.open.set()
    write.join()
    writer.poll()
    assert (storage.saved, writer.saved) == ({}, "")


def test_a_pack_is_saved_at_once_when_its_node_is_about_to_leave():
    storage = Storage()
    writer = writer_of(storage)
    assert writer.save_within(10, 7, lambda: b"state")
    assert storage.saved[NAME] == (7, b"state")
    assert writer.save_within(10, 7, lambda: pytest.fail("round 7 is saved"))
    storage.open.clear()
    assert not writer.save_within(0.01, 8, lambda: b"later")
    storage.open.set()


def test_a_storage_that_fails_when_its_node_is_about_to_leave():
    assert not writer_of(Storage(fails=1)).save_within(10, 7, lambda: b"state")


# ---- the state that packs start from and leave behind


class Federation:
    """Ends a pack in one step, and leaves the state of its lanes."""

    def __init__(self) -> None:
        self.opened: list = []

    def lanes_that_fit(self, trials, data):
        return None

    def open(self, trials, data, checkpoint=None, paused=()):
        self.opened.append((checkpoint, list(paused)))

    def progress(self, until):
        return SimpleNamespace(running=0, round=until, computing_s=0.0, results=())

    def paused(self):
        return KEYS, b"lanes"


def run_pack(storage: Storage, federation: Federation, **order):
    runner = PackRunner("slot", federation, storage)
    trial = SimpleNamespace(key="a", evaluate_every=1, last_round=1, stop_after=1)
    runner.start(Order(1, [trial], **order))
    return runner.advance()


def test_lanes_that_stopped_early_are_written_and_loaded():
    storage, federation = Storage(), Federation()
    assert run_pack(storage, federation).paused == NAME
    run_pack(storage, federation, continue_from=(NAME,))
    assert federation.opened == [(None, []), (None, [b"lanes"])]


@pytest.mark.parametrize("order", [{}, {"resume_from": NAME}, {"continue_from": (NAME,)}])
def test_a_storage_that_hangs_does_not_hang_a_slot(monkeypatch, order):
    """Neither when a pack starts nor when it ends. It then runs from round 0, and its lanes cannot continue."""
    monkeypatch.setattr(pack_runner, "LOAD_S", 0.01)
    monkeypatch.setattr(pack_runner, "SAVE_S", 0.01)
    storage, federation = Storage(), Federation()
    storage.open.clear()
    report = run_pack(storage, federation, **order)
    storage.open.set()
    assert (report.kind, report.paused, federation.opened) == ("ended", "", [(None, [])])
    assert len(report.notes) == 1 + len(order)
    assert all("the storage has not answered" in note for note in report.notes[:-1])


def test_a_write_that_hangs_is_waited_for_once():
    storage = Storage()
    storage.open.clear()
    writer = writer_of(storage)
    assert not writer.save_paused_within(0.01, KEYS, 1, b"lanes")
    assert not writer.save_paused_within(1000, KEYS, 1, b"lanes")
    storage.open.set()
