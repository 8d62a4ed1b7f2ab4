"""Where packs leave their checkpoints while a study runs."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PackStorage:
    path: str
    filesystem: Any = None
    """fsspec's; None: a folder of the driver's machine, which other nodes may see or not."""

    def within_reach(self) -> bool:
        """Whether this node sees what the driver has put there."""
        if self.filesystem is None:
            return Path(self.path).is_dir()
        try:
            return bool(self.filesystem.exists(self.path))
        except Exception:  # no network, no credentials: every kind of storage fails in its own way
            return False

    def clear(self) -> None:
        """Also of what a driver that was killed has left."""
        if self.filesystem is None:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        with contextlib.suppress(Exception):  # what is left costs room, not results
            if self.filesystem.exists(self.path):
                self.filesystem.rm(self.path, recursive=True)
