"""Where a study's results live: a folder of this machine, or a URL that fsspec opens (s3://bucket/folder, file:///nfs/x).

SQLite needs a real file system, and object storage is none. So a study at a URL runs in a working copy on this machine:
the ledger is fetched first, a whole copy of it goes back after every pack, and everything else at the end. Whoever runs
or looks from elsewhere begins with that copy. A driver that dies loses what it had not yet sent, at most.

One driver at a time: a lock object says who it is and when it was last alive. A second driver is refused while that is
recent; after a driver that died, the lock counts for nothing when its time is over. Should two ever hold it, because a
clock is wrong or a machine slept, the first sees at its next sign of life that it was replaced, and stops. Nothing
false can come of it, since a row is a pure function of its key: at worst something is computed twice.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.results.ledger import Ledger
from trainables import plugins
from trainables.errors import UserError
from trainables.federation.checkpoints import PackStorage
from trainables.urls import as_user_error, open_filesystem

HEARTBEAT_S = 20.0
LOCK_EXPIRES_S = 120.0  # longer than a few signs of life and the sending of a large ledger take
LEDGER, LOG, LOCK, CANCEL = "ledger.sqlite", "fedsweep.log", "remote.lock", "cancel.asked"
PACKS, SCRATCH = ".packs", ".tune"
NOT_UPLOADED = (LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm", "ledger.lock", CANCEL)  # the ledger goes as a snapshot
log = logging.getLogger("fedsweep")


class ResultsLocation:
    """A result folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Where to work."""

    def __str__(self) -> str:
        return str(self.folder)

    @contextlib.contextmanager
    def open_for_writing(self) -> Iterator[ResultsLocation]:
        """For the one process that runs the study."""
        yield self

    def request_stop(self) -> None:
        """Whoever runs the study finishes the packs in flight and ends, as after Ctrl-C."""
        try:
            (self.folder / CANCEL).touch()
        except OSError as error:
            raise UserError(f"result folder {self} cannot be written: {error}") from None

    def stop_requested(self) -> bool:
        """Since the last time this was asked."""
        found = (self.folder / CANCEL).exists()
        if found:
            (self.folder / CANCEL).unlink(missing_ok=True)
        return found

    @contextlib.contextmanager
    def open_for_reading(self) -> Iterator[Path]:
        """For anyone who looks, also while the study runs."""
        yield self.folder

    @property
    def checkpoints(self) -> PackStorage:
        return PackStorage(str((self.folder / PACKS).absolute()))

    def notify_recorded(self, count: int) -> None:
        """So many trials are in the ledger now."""

    def upload_tables(self) -> None:
        """Tables have been rebuilt in a copy to read."""

    def lock_holder(self) -> str | None:
        """Who runs the study from another place, if anyone; who runs it here, the folder's own lock says."""
        return None

    def address_of(self, path: Path) -> str:
        """A file of the folder, as others find it."""
        return str(path)


def results_location(where: str | Path) -> ResultsLocation:
    if isinstance(where, Path) or "://" not in where:
        return ResultsLocation(Path(where))
    return RemoteLocation(where)


def read_text(where: str | Path) -> str:
    """A file's text, of this machine or at a URL."""
    if isinstance(where, Path) or "://" not in where:
        return Path(where).read_text(encoding="utf-8")
    files, path = open_filesystem(where)
    with as_user_error(f"{where} cannot be read"):
        return files.cat_file(path).decode()


class RemoteLocation(ResultsLocation):
    """A result folder at a URL."""

    def __init__(self, url: str) -> None:
        self._files, self._root = open_filesystem(url)
        self.url = url.rstrip("/")
        self._me = f"process {os.getpid()} on {socket.gethostname()}"
        self._token = secrets.token_hex(8)
        self._recorded = self._sent = -1
        self._lost = ""
        self._stop = False
        self._wake, self._ended = threading.Event(), threading.Event()

    def __str__(self) -> str:
        return self.url

    @property
    def checkpoints(self) -> PackStorage:
        return PackStorage(f"{self._root}/{PACKS}", self._files)

    def address_of(self, path: Path) -> str:
        return f"{self.url}/{path.relative_to(self.folder).as_posix()}"

    @contextlib.contextmanager
    def open_for_reading(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="fedsweep-") as folder:
            self.folder = Path(folder)
            self._fetch(LEDGER)
            if not (self.folder / LEDGER).exists():
                raise UserError(f"result folder {self.url} holds no {LEDGER}")
            yield self.folder

    @contextlib.contextmanager
    def open_for_writing(self) -> Iterator[ResultsLocation]:
        self._take_lock()
        keeper = threading.Thread(target=self._keep, name="fedsweep-results", daemon=True)
        self.folder = Path(tempfile.mkdtemp(prefix="fedsweep-"))
        try:
            self._fetch(LEDGER, LOG)
        except BaseException:
            self._let_go()
            raise
        keeper.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._wake.set()
            keeper.join()
            self._hand_over()

    def _fetch(self, *names: str) -> None:
        with as_user_error(f"the results at {self.url} cannot be read"):
            for name in names:
                if self._files.exists(f"{self._root}/{name}"):
                    self._files.get_file(f"{self._root}/{name}", str(self.folder / name))

    # ---- while the study runs

    def request_stop(self) -> None:
        with as_user_error(f"the results at {self.url} cannot be written"):
            self._files.pipe_file(f"{self._root}/{CANCEL}", self._sign())

    def stop_requested(self) -> bool:
        return self._stop

    def notify_recorded(self, count: int) -> None:
        if self._lost:
            raise UserError(self._lost)
        if count != self._recorded:
            self._recorded = count
            self._wake.set()

    def _keep(self) -> None:
        """Gives signs of life, and sends the ledger when it has grown. What fails is tried again with the next."""
        while not self._ended.is_set():
            self._wake.wait(HEARTBEAT_S)
            self._wake.clear()
            try:
                self._renew_lock()
                if self._files.exists(f"{self._root}/{CANCEL}"):
                    self._files.rm_file(f"{self._root}/{CANCEL}")
                    self._stop = True
                if self._recorded != self._sent and not self._lost:
                    sending = self._recorded
                    self._send_ledger()
                    self._sent = sending
            except Exception as error:  # every kind of storage fails in its own way
                log.warning("the results could not be sent to %s, which is tried again: %s", self.url, error)
            if self._lost:
                return

    def _hand_over(self) -> None:
        """Send all there is and let go of the lock. If that cannot be done, the working copy stays and is named."""
        if not self._lost:
            with as_user_error(
                f"the results could not be sent to {self.url}; they are in {self.folder}, where "
                f"'fedsweep resume {self.folder}{plugins.import_options()}' goes on"
            ):
                self._send_ledger()
                self._send_files()
        self._let_go()

    def _let_go(self) -> None:
        if not self._lost:
            with as_user_error(f"the lock at {self.url} could not be taken away"):
                self._files.rm_file(f"{self._root}/{LOCK}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _send_ledger(self) -> None:
        if not (self.folder / LEDGER).exists():
            return
        with tempfile.TemporaryDirectory(prefix="fedsweep-") as folder:
            copy = Path(folder) / LEDGER
            with Ledger.read(self.folder) as ledger:
                ledger.copy_to(copy)
            self._send(copy, LEDGER)

    def _send_files(self) -> None:
        here = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*") if path.is_file()}
        for name, path in here.items():
            if name not in NOT_UPLOADED and not name.startswith((PACKS, SCRATCH)):
                self._send(path, name)
        tables = f"{self._root}/tables"
        if any(name.startswith("tables/") for name in here) and self._files.exists(tables):
            for found in self._files.ls(tables, detail=False):
                if f"tables/{found.rpartition('/')[2]}" not in here:
                    self._files.rm_file(found)  # the study has grown and calls it otherwise

    def upload_tables(self) -> None:
        with as_user_error(f"the tables could not be sent to {self.url}"):
            self._send_files()

    def _send(self, file: Path, name: str) -> None:
        """All of it or nothing: readers never meet half a file, on whatever storage."""
        target = f"{self._root}/{name}"
        self._files.put_file(str(file), f"{target}.{self._token}.part")
        self._files.mv(f"{target}.{self._token}.part", target)

    # ---- the lock

    def lock_holder(self) -> str | None:
        found = self._read_lock()
        return found["holder"] if found and _counts(found) else None

    def _read_lock(self) -> dict[str, Any] | None:
        for _ in range(5):
            try:
                return json.loads(self._files.cat_file(f"{self._root}/{LOCK}"))
            except FileNotFoundError:
                return None
            except ValueError:
                time.sleep(0.05)  # half written: on some storage it is for a moment, whenever it is renewed
        return None

    def _sign(self) -> bytes:
        return json.dumps({"holder": self._me, "token": self._token, "alive": time.time()}).encode()

    def _take_lock(self) -> None:
        with as_user_error(f"the results at {self.url} cannot be written"):
            try:
                self._files.pipe_file(f"{self._root}/{LOCK}", self._sign(), mode="create")
                return
            except FileExistsError:
                found = self._read_lock()
            if found and _counts(found):
                since = max(0.0, time.time() - found["alive"])
                raise UserError(
                    f"result folder {self.url} is in use by {found['holder']}, alive {since:.0f} s ago; if it is not, "
                    f"the folder is free in {LOCK_EXPIRES_S - since:.0f} s"
                )
            self._files.pipe_file(f"{self._root}/{LOCK}", self._sign())

    def _renew_lock(self) -> None:
        found = self._read_lock()
        if found and found["token"] != self._token:
            self._lost = f"result folder {self.url} was taken over by {found['holder']}"
            return
        self._files.pipe_file(f"{self._root}/{LOCK}", self._sign())


def _counts(lock: dict[str, Any]) -> bool:
    return time.time() - lock["alive"] < LOCK_EXPIRES_S
