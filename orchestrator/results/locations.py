"""Where a study's results live: a local folder, or a URL that fsspec opens (s3://bucket/folder, file:///nfs/x).

SQLite needs a real file system, which object storage is not. A study at a URL therefore runs in a local working copy.
The ledger is downloaded first, what a pack adds to it is uploaded after every pack, and all other files at the end.
Every reader downloads what was uploaded. A driver that dies loses at most what it had not uploaded yet.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from orchestrator.results.remote_ledger import LEDGER, LOGS, RemoteLedger
from orchestrator.results.remote_lock import EXPIRES_S, LOCK, LockLostError, RemoteLock
from trainables import plugins
from trainables.errors import UserError
from trainables.federation.checkpoints import PackStorage
from trainables.files import PRIVATE, make_private, open_in_place, read_plain, read_plain_text
from trainables.urls import as_user_error, fetch_text, is_local, open_filesystem, refuse_links, rename, shown_url

HEARTBEAT_S = 20.0
LOG = "fedsweep.log"
PACKS = ".packs"
FOLDERS = ("tables", "timing", "figures")
REPLACED = ("study.yaml", "best.yaml", "report.html")
log = logging.getLogger("fedsweep")


StopRequest = Literal["", "after packs", "now"]
STOP_FILES: dict[StopRequest, str] = {"now": "cancel.now", "after packs": "cancel.requested"}
"""A request is a file that exists, whatever it contains. So no request is lost or misread while it is written, or while
another one is taken. If both files exist, the first of this mapping counts."""
NOT_UPLOADED = (LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm", "ledger.lock", *STOP_FILES.values())
"""Files that stay in the working copy; `RemoteLedger` uploads the ledger and its log."""


def _stop_file(now: bool) -> str:
    return STOP_FILES["now" if now else "after packs"]


def _first(requests: list[StopRequest]) -> StopRequest:
    """The request that counts; "" if there is none."""
    return next((request for request in STOP_FILES if request in requests), "")


class ResultsLocation:
    """A local results folder. `Ledger.write` locks it: one driver at a time, any number of readers."""

    uploads_log = False
    """Whether SQLite's write-ahead log is uploaded, and so not merged into the ledger during a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """The local folder to work in."""

    def __str__(self) -> str:
        return str(self.folder)

    @contextlib.contextmanager
    def open_for_writing(self) -> Iterator[ResultsLocation]:
        """For the one process that writes, such as the driver."""
        yield self

    def protect(self) -> None:
        """Make the results private to this user if the ledger is. In a local folder, `Ledger.write` has done so."""

    @contextlib.contextmanager
    def open_for_reading(self) -> Iterator[Path]:
        """For any process, also while the study runs."""
        yield self.folder

    def request_stop(self, now: bool = False) -> None:
        """Ask the running driver to finish the packs in flight and exit, as after Ctrl-C; `now`: to exit at once, as
        after a second Ctrl-C."""
        try:
            os.close(open_in_place(self.folder / _stop_file(now), os.O_WRONLY))
        except OSError as error:
            raise UserError(f"results folder {self} cannot be written: {error}") from None

    def stop_requested(self) -> StopRequest:
        """The request, if there is one. A local folder returns it once, a URL at every later call, too."""
        return _first([request for request, name in STOP_FILES.items() if self._take_file(self.folder / name)])

    def _take_file(self, path: Path) -> bool:
        try:
            read_plain(path, 100)  # refuses links and pipes
        except FileNotFoundError:
            return False
        path.unlink(missing_ok=True)
        return True

    @property
    def checkpoints(self) -> PackStorage:
        return PackStorage(str((self.folder / PACKS).absolute()))

    def notify_recorded(self, count: int) -> None:
        """`count` changes whenever the ledger does. A ledger at a URL is then uploaded. Raises if another driver has
        taken over."""

    def leave(self, seconds: float) -> str:
        """The process is about to end without cleanup: release the lock within `seconds`, so that another driver can
        continue. If that fails, returns what the user must know, as part of a sentence."""
        return ""

    def upload_tables(self) -> None:
        """Upload tables that were rebuilt in a copy opened for reading."""

    def lock_holder(self) -> str | None:
        """The driver that holds the lock at a URL, if any. A local folder is locked by its ledger instead."""
        return None

    def address_of(self, path: Path) -> str:
        """The public path or URL of a file in the folder."""
        return str(path)


def results_location(where: str | Path) -> ResultsLocation:
    if isinstance(where, Path) or "://" not in where:
        return ResultsLocation(Path(where))
    return RemoteLocation(where)


def default_folder(study: str) -> Path:
    """results/STUDY. Links are refused: the study and the current folder may come from anyone."""
    folder = Path("results") / study
    for place in (folder.parent, folder):
        if place.is_symlink():
            raise UserError(f"{place} is a symbolic link; to write to {folder.resolve()}, name it with --results")
    return folder


def read_text(where: str | Path) -> str:
    """The text of a local file or of a file at a URL."""
    if isinstance(where, Path) or "://" not in where:
        return read_plain_text(Path(where))
    with as_user_error(f"{shown_url(where)} cannot be read"):
        return fetch_text(where)


class RemoteLocation(ResultsLocation):
    """A results folder at a URL.

    Concurrency contract:

    * One driver at a time holds the lock. A second driver is refused until the lock has expired, so a dead driver
      blocks its successor for that long at most.
    * One thread renews the lock and looks for stop requests, another uploads the ledger when it has grown: an upload
      that takes long does not let the lock expire. A failed step is retried later. The main thread talks to them
      through `_recorded`, `_wake`, `_closing` and `_closed`; they answer through `_uploaded`, `_stop` and `_lock_lost`.
    * A driver that was suspended may have lost the lock. It checks the lock before each upload becomes visible. If the
      lock is lost, it uploads nothing more, keeps the remaining rows, and stops. Results stay correct, because a ledger
      row is a pure function of its key: at worst, trials are computed twice.
    * An upload becomes visible as a whole: readers never see a partial file.
    """

    uploads_log = True

    def __init__(self, url: str) -> None:
        self._files, self._root = open_filesystem(url)
        refuse_links(self._files, self._root, LEDGER, LOGS, LOG, LOCK, *STOP_FILES.values(), PACKS, *FOLDERS, *REPLACED)
        self.url = shown_url(url).rstrip("/")
        """For messages."""
        self.lock = RemoteLock(self._files, self._root, self.url)
        self._ledger = RemoteLedger(self._files, self._root)
        self._recorded = self._uploaded = -1  # `count` of `notify_recorded`: the latest, and at the last upload
        self._holds_lock = False
        self._lock_lost = ""  # the error to raise once another driver has taken over
        self._stop: StopRequest = ""
        self._wake, self._closing, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._finishing = threading.Lock()  # held while a thread makes the last uploads

    def __str__(self) -> str:
        return self.url

    @property
    def checkpoints(self) -> PackStorage:
        return PackStorage(f"{self._root}/{PACKS}", self._files)

    def protect(self) -> None:
        if self._is_private:
            Path(self._root).mkdir(parents=True, exist_ok=True)
            make_private(Path(self._root))

    @property
    def _is_private(self) -> bool:
        """Whether the results are on this machine, and only this user can read the ledger."""
        ledger = self.folder / LEDGER
        return is_local(self._files) and ledger.exists() and not ledger.stat().st_mode & 0o077

    def address_of(self, path: Path) -> str:
        return f"{self.url}/{path.relative_to(self.folder).as_posix()}"

    @contextlib.contextmanager
    def open_for_reading(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="fedsweep-") as folder:
            self.folder = Path(folder)
            self._download()
            if not (self.folder / LEDGER).exists():
                raise UserError(f"results folder {self.url} holds no {LEDGER}")
            yield self.folder

    @contextlib.contextmanager
    def open_for_writing(self) -> Iterator[ResultsLocation]:
        with as_user_error(f"the results at {self.url} cannot be written"):
            self.lock.acquire()
        self._holds_lock = True
        self.folder = Path(tempfile.mkdtemp(prefix="fedsweep-"))
        try:
            with as_user_error(f"the results at {self.url} cannot be written"):
                self._take_stop_requests()
            self._stop = ""  # they were meant for an earlier driver
            self._download(LOG)
        except BaseException:
            self._release_lock()
            raise
        self._renewals = threading.Thread(target=self._renew, name="fedsweep-lock", daemon=True)
        self._uploads = threading.Thread(target=self._upload_changes, name="fedsweep-results", daemon=True)
        self._renewals.start()
        self._uploads.start()
        try:
            yield self
        finally:
            with self._finishing:
                if self._holds_lock:
                    self._finish()

    def _finish(self) -> None:
        self._end_uploads()
        try:
            self._upload_everything()
        finally:
            self._end_renewals()
        self._release_lock()

    def _end_uploads(self) -> None:
        self._closing.set()
        self._wake.set()
        self._uploads.join()

    def _end_renewals(self) -> None:
        self._closed.set()
        self._renewals.join()

    def leave(self, seconds: float) -> str:
        ended = threading.Event()

        def upload_and_release() -> None:
            with self._finishing, self._retried_later("the results could not be uploaded to %s: %s"):
                if self._holds_lock:
                    self._end_uploads()
                    self._upload_ledger()
                    if (self.folder / LOG).exists():
                        self._upload(self.folder / LOG, LOG)
                    self._end_renewals()
                    self.lock.release()
                    self._holds_lock = False
                    shutil.rmtree(self.folder, ignore_errors=True)
            ended.set()

        threading.Thread(target=upload_and_release, name="fedsweep-leave", daemon=True).start()
        ended.wait(seconds)
        if not self._holds_lock:
            return ""
        lock = self._lock_lost or f"the lock at {self.url} expires in {EXPIRES_S:.0f} s"
        return f"{lock}; {self._where_unsent_rows_are}"

    @property
    def _where_unsent_rows_are(self) -> str:
        merge = plugins.command("merge", self.url, str(self.folder), "--results", "DIR")
        return f"trials that were not uploaded are in {self.folder}, and '{merge}' adds them"

    def _download(self, *names: str) -> None:
        """Download the ledger and these files."""
        with as_user_error(f"the results at {self.url} cannot be read"):
            self._ledger.download(self.folder)
            for name in names:
                if self._files.exists(f"{self._root}/{name}"):
                    self._files.get_file(f"{self._root}/{name}", str(self.folder / name))

    # ---- while the study runs

    def request_stop(self, now: bool = False) -> None:
        with as_user_error(f"the results at {self.url} cannot be written"):
            self._files.pipe_file(f"{self._root}/{_stop_file(now)}", b"stop")

    def stop_requested(self) -> StopRequest:
        return self._stop

    def _take_stop_requests(self) -> None:
        for request, name in STOP_FILES.items():
            with contextlib.suppress(FileNotFoundError):
                self._files.cat_file(f"{self._root}/{name}")
                self._stop = _first([request, self._stop])  # counts even if the next line fails
                self._files.rm_file(f"{self._root}/{name}")

    def notify_recorded(self, count: int) -> None:
        if count != self._recorded:
            self._recorded = count
            self._wake.set()
        if self._lock_lost:
            raise UserError(self._lock_lost)

    def _renew(self) -> None:
        while not self._closed.wait(HEARTBEAT_S) and not self._lock_lost:
            with self._retried_later("the lock at %s could not be renewed, will retry: %s"):
                self.lock.renew()
                self._take_stop_requests()

    def _upload_changes(self) -> None:
        while not self._closing.is_set() and not self._lock_lost:
            self._wake.wait(HEARTBEAT_S)
            self._wake.clear()
            if self._recorded != self._uploaded:
                with self._retried_later("results could not be uploaded to %s, will retry: %s"):
                    recorded = self._recorded
                    if (self.folder / LEDGER).exists():
                        self._upload_ledger()
                    self._uploaded = recorded

    def _upload_ledger(self) -> None:
        self.protect()
        self._ledger.upload(self.folder, self._upload, self.lock.check)

    @contextlib.contextmanager
    def _retried_later(self, message: str) -> Iterator[None]:
        """Log an error instead of raising it. A lost lock is noted."""
        try:
            yield
        except LockLostError as error:
            self._lock_lost = str(error)
        except Exception as error:  # each file system raises its own exception types
            log.warning(message, self.url, error)

    def _upload_everything(self) -> None:
        """Upload the ledger and all files. If that fails, keep the working copy and name it in the error."""
        if not self._lock_lost:
            with (
                self._keeping_unsent_rows(),
                as_user_error(
                    f"the results could not be uploaded to {self.url}; they are in {self.folder}, and "
                    f"'{plugins.command('resume', str(self.folder))}' continues there"
                ),
            ):
                self.protect()
                self._ledger.finish(self.folder, self._upload, self.lock.check)
                self._uploaded = self._recorded
                self._upload_files()

    @contextlib.contextmanager
    def _keeping_unsent_rows(self) -> Iterator[None]:
        """If the lock is lost, note it instead of raising: `_release_lock` then keeps the working copy."""
        try:
            yield
        except LockLostError as error:
            self._lock_lost = str(error)

    def _upload_files(self) -> None:
        local = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*") if path.is_file()}
        for name, path in local.items():
            if name not in NOT_UPLOADED and not name.startswith(PACKS):
                self._upload(path, name)
        tables = f"{self._root}/tables"
        if any(name.startswith("tables/") for name in local) and self._files.exists(tables):
            for remote in self._files.ls(tables, detail=False):
                if f"tables/{remote.rpartition('/')[2]}" not in local:
                    self._files.rm_file(remote)  # a table that the study no longer has

    def upload_tables(self) -> None:
        with as_user_error(f"the tables could not be uploaded to {self.url}"):
            self._upload_files()

    def _upload(self, file: Path, name: str) -> None:
        """Upload under a temporary name, then rename, unless the lock was lost meanwhile."""
        target, part = f"{self._root}/{name}", f"{self._root}/{name}.{self.lock.token}.part"
        self._files.put_file(str(file), part)
        if name in (LEDGER, LOG) and self._is_private:
            os.chmod(part, PRIVATE)
        try:
            if self._holds_lock:
                self.lock.check()
        except LockLostError:
            self._files.rm_file(part)
            raise
        rename(self._files, part, target)

    # ---- the lock

    def lock_holder(self) -> str | None:
        with as_user_error(f"the lock at {self.url} cannot be read"):
            holder = self.lock.holder()
        return holder.name if holder and holder.is_valid else None

    def _release_lock(self) -> None:
        """Release the lock and delete the working copy. The copy is kept if another driver has taken over and rows were
        not uploaded."""
        if not self._lock_lost:
            with self._keeping_unsent_rows(), as_user_error(f"the lock at {self.url} could not be removed"):
                self.lock.release()
        self._holds_lock = False
        if self._lock_lost and self._recorded != self._uploaded:
            raise UserError(f"{self._lock_lost}; {self._where_unsent_rows_are}")
        shutil.rmtree(self.folder, ignore_errors=True)
