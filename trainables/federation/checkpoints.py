"""Checkpoints of packs, named after their trials, so that any slot that resumes these trials finds the checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainables import files

ENDING = ".checkpoint"
PAUSED = ".paused"
"""Lanes of a pack whose trials stopped early and may continue."""


class CorruptCheckpointError(Exception):
    """The checksum does not match."""


class UnusableCheckpointError(ValueError):
    """The checkpoint does not fit the pack or this version of the program."""


def checkpoint_name(keys: Iterable[str]) -> str:
    return hashlib.sha256("".join(sorted(keys)).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class PackStorage:
    path: str
    filesystem: Any = None
    """An fsspec file system; None: a folder on the driver's machine, which other nodes may not see."""

    def create(self) -> None:
        if self.filesystem is None:
            files.subfolder(Path(self.path).parent, Path(self.path).name)
        else:
            self.filesystem.makedirs(self.path, exist_ok=True)
            self.filesystem.pipe_file(f"{self.path}/here", b"")  # object storage has no folders

    # ---- a file: checksum, a line of JSON with the round and the trials, the checkpoint

    def save(self, keys: Sequence[str], t: int, checkpoint: bytes, ending: str = ENDING) -> None:
        body = json.dumps({"t": t, "keys": list(keys)}).encode() + b"\n" + checkpoint
        content = zlib.crc32(body).to_bytes(4, "little") + body
        name = checkpoint_name(keys) + ending
        if self.filesystem is not None:
            self.filesystem.pipe_file(f"{self.path}/{name}", content)
            return
        with files.replacing(Path(self.path) / name, durable=True) as out:
            out.write(content)

    def load(self, name: str, ending: str = ENDING) -> tuple[int, bytes]:
        """Its round, and the checkpoint."""
        if self.filesystem is None:
            content = (Path(self.path) / (name + ending)).read_bytes()
        else:
            content = self.filesystem.cat_file(f"{self.path}/{name}{ending}")
        body = content[4:]
        if len(content) < 4 or zlib.crc32(body) != int.from_bytes(content[:4], "little"):
            raise CorruptCheckpointError(name)
        line, _, checkpoint = body.partition(b"\n")
        return json.loads(line)["t"], checkpoint

    def trials_by_checkpoint(self) -> dict[str, list[str]]:
        """The trial keys of every readable checkpoint."""
        return {name: keys for name, (_, keys) in self._headers(ENDING).items()}

    def paused_lanes(self) -> dict[str, tuple[str, int]]:
        """File and round of every lane that may continue, by the full key of its trial. The latest round counts."""
        found = [(t, key, name) for name, (t, keys) in self._headers(PAUSED).items() for key in keys]
        return {key: (name, t) for t, key, name in sorted(found)}

    def _headers(self, ending: str) -> dict[str, tuple[int, list[str]]]:
        """Round and keys of every readable file."""
        readable: dict[str, tuple[int, list[str]]] = {}
        for name in self._names(ending):
            with contextlib.suppress(Exception):  # corrupt, or just removed
                if self.filesystem is None:
                    file = (Path(self.path) / (name + ending)).open("rb")
                else:
                    file = self.filesystem.open(f"{self.path}/{name}{ending}", "rb")
                with file:
                    file.seek(4)
                    header = json.loads(file.readline())
                if checkpoint_name(header["keys"]) == name:
                    readable[name] = int(header["t"]), header["keys"]
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

    def clear(self, only_if_empty: bool = False) -> None:
        if only_if_empty and (self._names(ENDING) or self._names(PAUSED)):
            return
        if self.filesystem is None:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        with contextlib.suppress(Exception):  # a file left behind costs disk space, not results
            if self.filesystem.exists(self.path):
                self.filesystem.rm(self.path, recursive=True)
