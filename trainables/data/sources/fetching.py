"""Finds the files of a source: among the user's files, in the cache, or on the network.

An interrupted download resumes where it stopped. A download stays in the cache only if its checksum is right.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainables.data.sources.catalogue import File
from trainables.errors import UserError
from trainables.files import current_folder, open_in_place, user_folder

CHUNK = 1 << 16  # at most this much is lost when a download is interrupted
ATTEMPTS = 3
TIMEOUT_S = 30.0

Progress = Callable[[str, int, int | None], None]
"""Called after every chunk: the file's name, bytes so far, total bytes if known."""


def cache_folder() -> Path:
    """$FEDSWEEP_CACHE, or fedsweep in the user's cache folder."""
    chosen = os.environ.get("FEDSWEEP_CACHE")
    return current_folder() / chosen if chosen else user_folder("XDG_CACHE_HOME", ".cache")


def cached_path(file: File) -> Path:
    """Where the download of a file is kept. Files of the same name, such as those of MNIST and Fashion-MNIST, are told
    apart by the last folder of their URLs."""
    return cache_folder() / "sources" / Path(urlsplit(file.url).path).parent.name / file.name


def data_folder() -> Path:
    """The folder of feature files: $FEDSWEEP_DATA, or data in the cache folder."""
    chosen = os.environ.get("FEDSWEEP_DATA")
    return current_folder() / chosen if chosen else cache_folder() / "data"


def checksum_error(path: Path, checksum: str) -> str:
    """How a file differs from its checksum; empty if it does not."""
    kind, _, expected = checksum.partition(":")
    if not checksum:
        return ""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "md5" if kind == "md5" else "sha256").hexdigest()
    matches = actual.startswith(expected) if kind == "sha256-prefix" else actual == expected
    return "" if matches else f"its {kind.removesuffix('-prefix')} is {actual}, not {expected}"


def fetch(
    file: File,
    local: Sequence[Path] = (),
    progress: Progress | None = None,
    advice: str = "pass its folder with --from",
) -> Path:
    """The path of the complete and verified file. `local`: files and folders of the user, which are only read.
    `advice`: what to do with a copy, where there is no network."""
    for entry in local:
        path = entry / file.name if entry.is_dir() else entry
        if path.is_file() and path.name == file.name:
            return _verified(path, file)
    cached = cached_path(file)
    if cached.is_file():
        return _verified(cached, file, "; delete it, then the same command downloads it again")
    return _download(file, cached, progress or (lambda *_: None), advice)


def _verified(path: Path, file: File, advice: str = "") -> Path:
    try:
        problem = checksum_error(path, file.checksum)
    except OSError as error:
        raise UserError(f"file {path} cannot be read: {error.strerror}") from None
    if problem:
        raise UserError(f"file {path} is not the published {file.name}: {problem}{advice}")
    return path


def _download(file: File, target: Path, progress: Progress, advice: str) -> Path:
    import pooch  # slow to import, like requests
    import requests

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cache folder {target.parent} cannot be created: {error.strerror}") from None
    # pooch cannot check a prefix; `checksum_error` does below
    known = None if file.checksum.startswith("sha256-prefix") else file.checksum or None
    pooch.get_logger().setLevel("ERROR")
    downloader = _ResumingDownloader(target.with_name(f"{target.name}.part"), file.name, progress)
    try:
        pooch.retrieve(file.url, known, fname=target.name, path=target.parent, downloader=downloader)
    except ValueError as error:
        if "hash" not in str(error):
            raise
        raise UserError(f"{file.url} is not the published {file.name}: its checksum differs") from None
    except _InterruptedError as error:
        raise UserError(
            f"the download of {file.url} was interrupted after {error}; the same command resumes it"
        ) from None
    except requests.RequestException as error:
        reason = f"status {error.response.status_code}" if error.response is not None else "no connection"
        raise UserError(
            f"{file.url} cannot be downloaded ({reason}); get {file.name} on a machine with a network "
            f"({file.checksum or 'it has no published checksum'}) and {advice}"
        ) from None
    except OSError as error:
        raise UserError(f"file {target} cannot be written: {error.strerror or error}") from None
    problem = checksum_error(target, file.checksum)
    if problem:
        target.unlink()
        raise UserError(f"{file.url} is not the published {file.name}: {problem}")
    return target


class _InterruptedError(Exception):
    """The message says how much was downloaded."""


class _ResumingDownloader:
    """A downloader for pooch that keeps what it has in a .part file next to the target."""

    def __init__(self, part: Path, name: str, progress: Progress) -> None:
        self.part, self.name, self.progress = part, name, progress

    def __call__(self, url: str, output_file: Any, pooch: Any, check_only: bool = False) -> None:
        import requests

        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._fetch(url)
                break
            except (requests.exceptions.ChunkedEncodingError, requests.exceptions.ConnectionError, _InterruptedError):
                size = self._size()
                if not size:
                    raise
                if attempt == ATTEMPTS:
                    raise _InterruptedError(f"{size:,} bytes") from None
        os.replace(self.part, output_file)

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _fetch(self, url: str) -> None:
        import requests

        start = self._size()
        headers = {"Range": f"bytes={start}-", "Accept-Encoding": "identity"} if start else {}
        with requests.get(url, stream=True, timeout=TIMEOUT_S, headers=headers) as response:
            if response.status_code == 416:  # complete, or the remote file has changed: the checksum decides
                return
            response.raise_for_status()
            if url.startswith("https://") and not response.url.startswith("https://"):
                raise requests.RequestException(f"{url} was redirected to a place that is not encrypted")
            content_range = response.headers.get("Content-Range", "")
            resumes = response.status_code == 206 and content_range.startswith(f"bytes {start}-")
            start = start if resumes else 0
            length = response.headers.get("Content-Length")
            total = start + int(length) if length is not None and "Content-Encoding" not in response.headers else None
            descriptor = open_in_place(self.part, os.O_WRONLY | (os.O_APPEND if resumes else os.O_TRUNC))
            with os.fdopen(descriptor, "ab" if resumes else "wb") as out:
                done = start
                for chunk in response.iter_content(CHUNK):
                    out.write(chunk)
                    done += len(chunk)
                    self.progress(self.name, done, total)
        if total is not None and done < total:
            raise _InterruptedError(f"{done:,} of {total:,} bytes")
