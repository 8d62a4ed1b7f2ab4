"""The ledger at a URL. After most packs, only what the pack added is uploaded, not the whole ledger.

SQLite appends every transaction to a log next to the ledger (write-ahead log). While a study runs, the log is not
merged into the ledger; what was added to it is uploaded as a new file. When the log has become larger than the ledger
(and than 16 MB), both are merged and the ledger is uploaded as a whole: all uploads together are up to ten times as
large as the ledger.

    ledger.sqlite            a complete ledger, as of the last merge
    ledger.log/current       the name of the current log, and the hash of the ledger that it continues
    ledger.log/NAME/000000   the parts of that log; joined they are ledger.sqlite-wal

A reader looks at `current` before and after it reads. If it has changed, the ledger was replaced meanwhile, and the
reader starts again. A merged ledger contains its log, and is uploaded before `current` changes: if the hash is that of
another ledger, the reader ignores the log. So whenever a driver dies, no uploaded trial is lost.
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from trainables.files import sha256

LEDGER, LOGS = "ledger.sqlite", "ledger.log"
CURRENT = f"{LOGS}/current"
SMALLEST_MERGE = 1 << 24  # bytes of the log; with less, a small ledger would be uploaded as a whole every few packs
ATTEMPTS = 20  # to read a ledger that is replaced meanwhile
HEADER, FRAME_HEADER = 32, 24  # bytes, in SQLite's format of the log


class RemoteLedger:
    def __init__(self, files: Any, root: str) -> None:
        self._files, self._root = files, root
        self._log = ""  # the name of the log that this process uploads
        self._salt = b""  # of that log; changes when SQLite restarts the log
        self._sent = self._parts = 0  # bytes and parts of the log that are uploaded
        self._merged = (0, 0)  # the version of the ledger that is uploaded

    # ---- reading

    def download(self, folder: Path) -> None:
        """Download the ledger, if there is one, and its log."""
        for _ in range(ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):
                before = self._current()
                if not self._files.exists(f"{self._root}/{LEDGER}"):
                    return
                self._files.get_file(f"{self._root}/{LEDGER}", str(folder / LEDGER))
                log = b"".join(self._read_parts(before.log)) if before else b""
                if self._current() == before:
                    if before and log and before.ledger == sha256(folder / LEDGER):
                        (folder / f"{LEDGER}-wal").write_bytes(log)
                    return
        raise OSError(f"{LEDGER} was replaced {ATTEMPTS} times while it was read")

    def _current(self) -> _Current | None:
        try:
            log, _, ledger = self._files.cat_file(f"{self._root}/{CURRENT}").decode(errors="replace").partition(" ")
        except FileNotFoundError:
            return None
        if not ledger:
            raise OSError(f"{CURRENT} names no ledger: it was written by an earlier version of fedsweep")
        return _Current(log, ledger) if log.isalnum() else None

    def _read_parts(self, log: str) -> list[bytes]:
        try:
            names = sorted(self._files.ls(f"{self._root}/{LOGS}/{log}", detail=False))
        except FileNotFoundError:
            return []  # the log has no part yet, or has been replaced
        return [self._files.cat_file(name) for name in names if name.rpartition("/")[2].isdecimal()]

    # ---- writing

    def upload(self, folder: Path, replace: Callable[[Path, str], None], check: Callable[[], None]) -> None:
        """Upload what was added since the last call. `replace`: uploads a file in place of another. `check`: raises
        an error if this process may not write any more."""
        log = _committed(folder / f"{LEDGER}-wal", self._sent)
        if self._log and self._merged == _version(folder / LEDGER) and log is None:
            return
        if log is None or not self._continues(log, folder):
            ledger, name = self._replace(folder, replace, check), secrets.token_hex(8)
            self._files.pipe_file(f"{self._root}/{CURRENT}", f"{name} {ledger}".encode())
            self._log = name
        elif log.added:
            check()
            self._files.pipe_file(f"{self._root}/{LOGS}/{self._log}/{self._parts:06}", log.added)
            self._salt, self._sent, self._parts = log.salt, log.end, self._parts + 1

    def _continues(self, log: _Log, folder: Path) -> bool:
        """Whether the log continues what is uploaded: it was not merged by another connection, not restarted, and is
        not so large that a merge is due."""
        return (
            bool(self._log)
            and self._merged == _version(folder / LEDGER)
            and self._salt in (b"", log.salt)
            and log.end <= max(SMALLEST_MERGE, _version(folder / LEDGER)[1])
        )

    def finish(self, folder: Path, replace: Callable[[Path, str], None], check: Callable[[], None]) -> None:
        """Upload the ledger as a whole, without a log."""
        if (folder / LEDGER).exists():
            self._replace(folder, replace, check)

    def _replace(self, folder: Path, replace: Callable[[Path, str], None], check: Callable[[], None]) -> str:
        """Merge the log into the ledger, upload the ledger, and delete the uploaded log. Returns the ledger's hash."""
        self._log, self._salt, self._sent, self._parts = "", b"", 0, 0
        with contextlib.closing(sqlite3.connect(folder / LEDGER, isolation_level=None, timeout=30)) as connection:
            busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                raise OSError("the ledger is in use")
            connection.execute("BEGIN")  # while this connection reads, nothing is merged into the file
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            check()
            replace(folder / LEDGER, LEDGER)
            self._merged, uploaded = _version(folder / LEDGER), sha256(folder / LEDGER)
        with contextlib.suppress(FileNotFoundError):  # first: a reader would take what is left of the log for all of it
            self._files.rm_file(f"{self._root}/{CURRENT}")
        if self._files.exists(f"{self._root}/{LOGS}"):
            self._files.rm(f"{self._root}/{LOGS}", recursive=True)
        return uploaded


class _Current(NamedTuple):
    log: str
    ledger: str
    """Hash of the ledger that the log continues."""


class _Log(NamedTuple):
    salt: bytes
    """SQLite chooses another salt whenever it restarts the log."""
    added: bytes
    """Whole transactions."""
    end: int
    """Position in the log where `added` ends."""


def _committed(log: Path, start: int) -> _Log | None:
    """The complete transactions of a log from a position on; None if the log is empty."""
    try:
        with log.open("rb") as file:
            header = file.read(HEADER)
            file.seek(start)
            content = file.read()
    except FileNotFoundError:
        return None
    if len(header) < HEADER:
        return None
    size, salt = FRAME_HEADER + int.from_bytes(header[8:12]), header[16:24]
    position, end = HEADER if start == 0 else 0, 0
    while position + size <= len(content) and content[position + 8 : position + 16] == salt:
        ends_transaction = any(content[position + 4 : position + 8])
        position += size
        if ends_transaction:
            end = position
    return _Log(salt, content[:end], start + end)


def _version(file: Path) -> tuple[int, int]:
    """Changes when the file is written. The second number is its size."""
    status = file.stat()
    return status.st_mtime_ns, status.st_size
