"""Getting the files of a source: from where the user has them, from the cache, or from the network.

A download goes on where it was cut off, and becomes a file of the cache only once its checksum is right.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainables.data.sources.catalogue import File
from trainables.errors import UserError

CHUNK = 1 << 16  # what is lost of a download that breaks off
ATTEMPTS = 3
TIMEOUT_S = 30.0

Progress = Callable[[str, int, int | None], None]
"""Told of every piece: the file's name, bytes so far, bytes in all if known."""


def cache_folder() -> Path:
    """$FEDSWEEP_CACHE, or the user's cache."""
    chosen = os.environ.get("FEDSWEEP_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedsweep"


def data_folder() -> Path:
    """Where feature files are written and found: $FEDSWEEP_DATA, or a folder of the cache."""
    chosen = os.environ.get("FEDSWEEP_DATA")
    return Path(chosen) if chosen else cache_folder() / "data"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def wrong(path: Path, checksum: str) -> str:
    """What is wrong with a file, or nothing."""
    kind, _, expected = checksum.partition(":")
    if not checksum:
        return ""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "md5" if kind == "md5" else "sha256").hexdigest()
    right = found.startswith(expected) if kind == "sha256-prefix" else found == expected
    return "" if right else f"its {kind.removesuffix('-prefix')} is {found}, not {expected}"


def fetch(file: File, given: Sequence[Path] = (), progress: Progress | None = None) -> Path:
    """The path of the file, whole and checked. `given`: files and folders of the user's, which are never written."""
    for place in given:
        path = place / file.name if place.is_dir() else place
        if path.is_file() and path.name == file.name:
            return _checked(path, file)
    cached = cache_folder() / "sources" / file.name
    if cached.is_file():
        return _checked(cached, file, "; delete it, and the same command fetches it again")
    return _download(file, cached, progress or (lambda *_: None))


def _checked(path: Path, file: File, advice: str = "") -> Path:
    try:
        problem = wrong(path, file.checksum)
    except OSError as error:
        raise UserError(f"file {path} cannot be read: {error.strerror}") from None
    if problem:
        raise UserError(f"file {path} is not the published {file.name}: {problem}{advice}")
    return path


def _download(file: File, target: Path, progress: Progress) -> Path:
    import pooch  # it and requests take their time to import
    import requests

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cache folder {target.parent} cannot be made: {error.strerror}") from None
    known = None if file.checksum.startswith("sha256-prefix") else file.checksum or None
    pooch.get_logger().setLevel("ERROR")
    part = target.with_name(f"{target.name}.part")
    try:
        pooch.retrieve(
            file.url, known, fname=target.name, path=target.parent, downloader=_Resuming(part, file.name, progress)
        )
    except ValueError as error:
        if "hash" not in str(error):
            raise
        raise UserError(f"what {file.url} sends is not the published {file.name}: its checksum differs") from None
    except _CutOffError as error:
        raise UserError(f"{file.url} broke off after {error}; the same command goes on from there") from None
    except requests.RequestException as error:
        reason = f"status {error.response.status_code}" if error.response is not None else "no connection"
        raise UserError(
            f"{file.url} cannot be fetched ({reason}); get {file.name} where there is a network "
            f"({file.checksum or 'it has no published checksum'}) and give its folder with --from"
        ) from None
    except OSError as error:
        raise UserError(f"file {target} cannot be written: {error.strerror or error}") from None
    problem = wrong(target, file.checksum)
    if problem:
        target.unlink()
        raise UserError(f"what {file.url} sends is not the published {file.name}: {problem}")
    return target


class _CutOffError(Exception):
    """How far a download came."""


class _Resuming:
    """A downloader for pooch that keeps what it has got in a .part file beside the target."""

    def __init__(self, part: Path, name: str, progress: Progress) -> None:
        self.part, self.name, self.progress = part, name, progress

    def __call__(self, url: str, output_file: Any, pooch: Any, check_only: bool = False) -> None:
        import requests

        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._fetch(url)
                break
            except (requests.exceptions.ChunkedEncodingError, requests.exceptions.ConnectionError, _CutOffError):
                got = self.part.stat().st_size if self.part.exists() else 0
                if attempt < ATTEMPTS and got:
                    continue
                if got:
                    raise _CutOffError(f"{got:,} bytes") from None
                raise
        os.replace(self.part, output_file)

    def _fetch(self, url: str) -> None:
        import requests

        start = self.part.stat().st_size if self.part.exists() else 0
        headers = {"Range": f"bytes={start}-", "Accept-Encoding": "identity"} if start else {}
        with requests.get(url, stream=True, timeout=TIMEOUT_S, headers=headers) as response:
            if response.status_code == 416:  # all of it is there, or another file than now: the checksum will tell
                return
            response.raise_for_status()
            goes_on = response.status_code == 206 and response.headers.get("Content-Range", "").startswith(
                f"bytes {start}-"
            )
            start = start if goes_on else 0
            length = response.headers.get("Content-Length")
            total = start + int(length) if length is not None and "Content-Encoding" not in response.headers else None
            with self.part.open("ab" if goes_on else "wb") as out:
                done = start
                for chunk in response.iter_content(CHUNK):
                    out.write(chunk)
                    done += len(chunk)
                    self.progress(self.name, done, total)
        if total is not None and done < total:
            raise _CutOffError(f"{done:,} of {total:,} bytes")
