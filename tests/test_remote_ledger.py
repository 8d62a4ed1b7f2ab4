"""The ledger at a URL travels in increments."""

import contextlib
import sqlite3
from pathlib import Path

import fsspec
import pytest
from handmade_rows import row

from orchestrator.results import remote_ledger
from orchestrator.results.ledger import Ledger
from orchestrator.results.remote_ledger import CURRENT, LEDGER, LOGS, RemoteLedger


class Remote:
    """A driver's connection with an empty URL; counts what it uploads."""

    def __init__(self, name: str) -> None:
        self.files, self.root = fsspec.filesystem("memory"), f"/{name}"
        self.ledger, self.whole = RemoteLedger(self.files, self.root), 0

    def replace(self, file: Path, name: str) -> None:
        self.whole += 1
        self.files.put_file(str(file), f"{self.root}/{name}")

    def upload(self, folder: Path) -> None:
        self.ledger.upload(folder, self.replace, lambda: None)

    def sizes(self) -> dict[str, int]:
        return {name.removeprefix(f"{self.root}/"): self.files.size(name) for name in self.files.find(self.root)}

    def trials(self, into: Path) -> int:
        """As a reader finds them."""
        into.mkdir()
        RemoteLedger(self.files, self.root).download(into)
        with contextlib.closing(sqlite3.connect(into / LEDGER)) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            return db.execute("SELECT count(*) FROM trials").fetchone()[0]


@pytest.fixture
def remote(tmp_path):
    made = Remote(tmp_path.name)
    yield made
    with contextlib.suppress(FileNotFoundError):
        made.files.rm(made.root, recursive=True)


def test_a_pack_uploads_what_it_adds(remote, tmp_path):
    folder = tmp_path / "local"
    with Ledger.write(folder, keeps_log=True) as ledger:
        for pack in range(6):
            ledger.add(row(100 * pack + number) for number in range(100))
            remote.upload(folder)
            assert remote.trials(tmp_path / f"reader {pack}") == 100 * (pack + 1)
        remote.upload(folder)
        parts = [size for name, size in remote.sizes().items() if name.startswith(LOGS) and name != CURRENT]
        assert (remote.whole, len(parts)) == (1, 5), "the first pack with the whole ledger, nothing twice"
    remote.ledger.finish(folder, remote.replace, lambda: None)
    assert list(remote.sizes()) == [LEDGER], "at the end there is one file"
    assert remote.trials(tmp_path / "last") == 600


def test_a_log_as_large_as_the_ledger_is_merged(remote, tmp_path, monkeypatch):
    """All uploads together stay a few times as large as the ledger."""
    monkeypatch.setattr(remote_ledger, "SMALLEST_MERGE", 1 << 12)
    folder = tmp_path / "local"
    with Ledger.write(folder, keeps_log=True) as ledger:
        for pack in range(40):
            ledger.add(row(20 * pack + number) for number in range(20))
            remote.upload(folder)
        assert 1 < remote.whole < 12
        assert remote.trials(tmp_path / "reader") == 800


def test_another_driver_continues_an_uploaded_log(remote, tmp_path):
    """The first one died: its log was not merged."""
    with Ledger.write(tmp_path / "first", keeps_log=True) as ledger:
        for number in range(3):
            ledger.add([row(number)])
            remote.upload(tmp_path / "first")
    second = tmp_path / "second"
    second.mkdir()
    continued = Remote(tmp_path.name)
    continued.ledger.download(second)
    with Ledger.write(second, keeps_log=True) as ledger:
        ledger.add([row(3)])
        continued.upload(second)
        ledger.add([row(4)])
        continued.upload(second)
        assert (continued.whole, continued.trials(tmp_path / "reader")) == (1, 5)


def test_a_log_that_sqlite_has_merged_itself_is_not_continued(remote, tmp_path):
    folder = tmp_path / "local"
    with Ledger.write(folder) as ledger:
        ledger.add([row(0)])
        remote.upload(folder)
        ledger.add([row(1)])
        remote.upload(folder)
        with contextlib.closing(sqlite3.connect(folder / LEDGER)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        ledger.add([row(2)])
        remote.upload(folder)
        assert (remote.whole, remote.trials(tmp_path / "reader")) == (2, 3)


def test_a_reader_starts_again_if_the_ledger_is_replaced_meanwhile(remote, tmp_path, monkeypatch):
    folder = tmp_path / "local"
    with Ledger.write(folder, keeps_log=True) as ledger:
        ledger.add([row(0)])
        remote.upload(folder)
        get, replaced = remote.files.get_file, []

        def slow(*arguments, **named):
            get(*arguments, **named)
            if not replaced:
                replaced.append(True)
                ledger.add([row(1)])
                remote.ledger._merged = (0, 0)  # forces a merge
                remote.upload(folder)
                ledger.add([row(2)])
                remote.upload(folder)

        monkeypatch.setattr(remote.files, "get_file", slow)
        assert remote.trials(tmp_path / "reader") == 3


def test_a_reader_starts_again_if_the_log_is_deleted_meanwhile(remote, tmp_path, monkeypatch):
    """Part of the log must not pass for all of it. A storage may delete the parts in any order."""
    folder = tmp_path / "local"
    with Ledger.write(folder, keeps_log=True) as ledger:
        for number in range(3):
            ledger.add([row(number)])
            remote.upload(folder)
        get, remove = remote.files.get_file, remote.files.rm

        def slow(*arguments, **named):
            get(*arguments, **named)
            monkeypatch.setattr(remote.files, "get_file", get)
            monkeypatch.setattr(remote.files, "rm", only_the_parts)
            remote.ledger.finish(folder, remote.replace, lambda: None)

        def only_the_parts(path, recursive):
            for name in remote.files.find(path):
                if not name.endswith(CURRENT):
                    remove(name)

        monkeypatch.setattr(remote.files, "get_file", slow)
        assert remote.trials(tmp_path / "reader") == 3


def test_a_log_of_an_earlier_version_is_refused(remote, tmp_path):
    folder = tmp_path / "local"
    with Ledger.write(folder, keeps_log=True) as ledger:
        ledger.add([row(0)])
        remote.upload(folder)
    remote.files.pipe_file(f"{remote.root}/{CURRENT}", b"0123456789abcdef")
    with pytest.raises(OSError, match="written by an earlier version"):
        remote.trials(tmp_path / "reader")


class DriverDied(BaseException):
    pass


@pytest.mark.parametrize("moment", ["before", "after", "rm", "pipe_file"])
@pytest.mark.parametrize("merges", ["while it runs", "at its end"])
def test_a_driver_that_dies_during_a_merge_loses_nothing(remote, tmp_path, monkeypatch, moment, merges):
    """Right before or after the merged ledger becomes visible, before the old log is deleted, or before the new one is
    named. Readers find all uploaded trials, and so does the driver that continues."""
    folder = tmp_path / "local"
    with Ledger.write(folder, keeps_log=True) as ledger:
        for number in range(3):
            ledger.add([row(number)])
            remote.upload(folder)

        def dying(*arguments, **named):
            raise DriverDied

        def dying_replace(file, name):
            if moment == "after":
                remote.replace(file, name)
            raise DriverDied

        in_replace = moment in ("before", "after")
        if not in_replace:
            monkeypatch.setattr(remote.files, moment, dying)
        remote.ledger._merged = (0, 0)  # forces a merge
        step = remote.ledger.upload if merges == "while it runs" else remote.ledger.finish
        with contextlib.suppress(DriverDied):
            step(folder, dying_replace if in_replace else remote.replace, lambda: None)
        monkeypatch.undo()
        assert remote.trials(tmp_path / "reader") == 3
    second, continued = tmp_path / "second", Remote(tmp_path.name)
    second.mkdir()
    continued.ledger.download(second)
    with Ledger.write(second, keeps_log=True) as ledger:
        for number in (3, 4):
            ledger.add([row(number)])
            continued.upload(second)
            assert continued.trials(tmp_path / f"reader {number}") == number + 1


def test_a_log_that_could_not_be_named_is_not_continued(remote, tmp_path, monkeypatch):
    """Readers would not find its parts."""
    folder = tmp_path / "local"
    with Ledger.write(folder, keeps_log=True) as ledger:
        ledger.add([row(0)])
        with monkeypatch.context() as patch:
            patch.setattr(remote.files, "pipe_file", broken)
            with pytest.raises(OSError, match="no network"):
                remote.upload(folder)
        for number in (1, 2):
            ledger.add([row(number)])
            remote.upload(folder)
        assert remote.trials(tmp_path / "reader") == 3


def broken(*arguments, **named):
    raise OSError("no network")
