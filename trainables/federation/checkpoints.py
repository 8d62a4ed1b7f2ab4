"""Checkpoints of packs, named after their trials, so that any slot that resumes these trials finds the checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainables import files
from trainables.code_identity import digest, package_identity
from trainables.federation.checkpoint_key import user_key
from trainables.federation.machine_memory import machine_bytes

ENDING = ".checkpoint"
PAUSED = ".paused"
"""Lanes of a pack whose trials stopped early and may continue."""
DIGEST = "sha256"
DIGEST_SIZE = 32  # bytes
LONGEST_HEADER = 1 << 26  # bytes; a key takes about 30


class CorruptCheckpointError(Exception):
    """The checkpoint is damaged, belongs to another user, or was written by other code."""


class UnusableCheckpointError(ValueError):
    """The checkpoint does not fit the pack or this version of the program."""


def checkpoint_name(keys: Iterable[str]) -> str:
    return hashlib.sha256("".join(sorted(keys)).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class PackStorage:
    path: str
    filesystem: Any = None
    """An fsspec file system; None: a folder on the driver's machine, which other nodes may not see."""
    key: bytes = field(default_factory=user_key, repr=False)
    """Authenticates checkpoints. It is the driver's, and travels to the nodes with this object."""
    code: str = field(default_factory=lambda: digest(package_identity()))
    """The digest of the driver's code: a trial must not continue with other code than it started with."""

    def create(self) -> None:
        if self.filesystem is None:
            files.subfolder(Path(self.path).parent, Path(self.path).name)
        else:
            self.filesystem.makedirs(self.path, exist_ok=True)
            self.filesystem.pipe_file(f"{self.path}/here", b"")  # object storage has no folders

    # ---- file format: an HMAC, a line of JSON with the round and the trials' keys, the checkpoint

    def save(self, keys: Sequence[str], t: int, checkpoint: bytes, ending: str = ENDING) -> None:
        header = json.dumps({"t": t, "keys": list(keys)}).encode() + b"\n"
        parts = (self._digest(ending, header, checkpoint), header, checkpoint)
        name = checkpoint_name(keys) + ending
        if self.filesystem is not None:
            self.filesystem.pipe_file(f"{self.path}/{name}", b"".join(parts))
            return
        with files.replacing(Path(self.path) / name, durable=True) as out:
            out.writelines(parts)

    def load(self, name: str, ending: str = ENDING) -> tuple[int, bytes]:
        """The round of the checkpoint, and its content."""
        if self.filesystem is None:
            content = files.read_plain(Path(self.path) / (name + ending), machine_bytes() // 4)
        else:
            content = self.filesystem.cat_file(f"{self.path}/{name}{ending}")
        found, body = content[:DIGEST_SIZE], memoryview(content)[DIGEST_SIZE:]
        if not hmac.compare_digest(found, self._digest(ending, body)):
            raise CorruptCheckpointError(name)
        length = content.index(b"\n", DIGEST_SIZE) + 1
        t, _ = _header(content[DIGEST_SIZE:length], name)
        return t, content[length:]

    def _digest(self, ending: str, *parts: bytes | memoryview) -> bytes:
        found = hmac.new(self.key, f"{ending} {self.code}\n".encode(), DIGEST)
        for part in parts:
            found.update(part)
        return found.digest()

    def trials_by_checkpoint(self) -> dict[str, list[str]]:
        """The trial keys of every readable checkpoint."""
        return {name: keys for name, (_, keys) in self._headers(ENDING).items()}

    def paused_lanes(self) -> dict[str, tuple[str, int]]:
        """File and round of every lane that may continue, by the full key of its trial. If several files have a
        lane, the one of the latest round counts."""
        found = [(t, key, name) for name, (t, keys) in self._headers(PAUSED).items() for key in keys]
        return {key: (name, t) for t, key, name in sorted(found)}

    def _headers(self, ending: str) -> dict[str, tuple[int, list[str]]]:
        """Round and keys of every readable file. Whether it is the user's own is checked when it is loaded."""
        readable: dict[str, tuple[int, list[str]]] = {}
        for name in self._names(ending):
            with contextlib.suppress(Exception):  # corrupt, or just removed
                if self.filesystem is None:
                    file = files.open_plain(Path(self.path) / (name + ending))
                else:
                    file = self.filesystem.open(f"{self.path}/{name}{ending}", "rb")
                with file:
                    file.seek(DIGEST_SIZE)
                    readable[name] = _header(file.readline(LONGEST_HEADER), name)
        return readable

    def _names(self, ending: str) -> list[str]:
        try:
            if self.filesystem is None:
                paths = [str(path) for path in Path(self.path).iterdir()]
            else:
                paths = self.filesystem.ls(self.path, detail=False)
        except FileNotFoundError:
            return []
        return [path.rpartition("/")[2].removesuffix(ending) for path in paths if path.endswith(ending)]

    def remove(self, name: str) -> None:
        with contextlib.suppress(Exception):  # a file left behind costs disk space, not results
            if self.filesystem is None:
                (Path(self.path) / (name + ENDING)).unlink(missing_ok=True)
            else:
                self.filesystem.rm_file(f"{self.path}/{name}{ENDING}")

    def remove_all(self, even_if_used: bool = True) -> None:
        """Remove the folder; without `even_if_used`, only if no trial can continue from a file in it."""
        if not even_if_used and (self._names(ENDING) or self._names(PAUSED)):
            return
        if self.filesystem is None:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        with contextlib.suppress(Exception):  # a file left behind costs disk space, not results
            if self.filesystem.exists(self.path):
                self.filesystem.rm(self.path, recursive=True)


def _header(line: bytes, name: str) -> tuple[int, list[str]]:
    header = json.loads(line)
    t, keys = header["t"], header["keys"]
    if type(t) is not int or t < 0 or checkpoint_name(keys) != name:
        raise CorruptCheckpointError(name)
    return t, keys
