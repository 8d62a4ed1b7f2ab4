"""Checkpoints are written in a thread; a storage that fails or hangs delays no round and is tried again."""

import threading
from dataclasses import dataclass, field

import pytest

from trainables.federation import checkpoint_writer
from trainables.federation.checkpoint_writer import CheckpointWriter
from trainables.federation.checkpoints import checkpoint_name

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

    def save(self, keys, t, checkpoint):
        self.open.wait()
        self.attempts += 1
        if self.attempts <= self.fails:
            raise OSError("503 Slow Down")
        self.saved[checkpoint_name(keys)] = (t, checkpoint)

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
