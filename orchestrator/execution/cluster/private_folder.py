"""A folder that only this user can enter, for the sockets, logs and spilled objects of a local Ray, and for Tune's own
files.

By default, the Rays of all users share one folder, in which every user can rename the files of others, even the sockets
of a running Ray.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from trainables.errors import UserError
from trainables.files import is_private

LONGEST_SOCKET = 107  # bytes in the path of a Unix socket
LONGEST_SUFFIX = len("/fedsweep-0123456789/r/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store.1")
FALLBACK = "/tmp"  # used if the path of a socket would be too long in another folder


def private_folder() -> Path:
    """A folder in RAY_TMPDIR, TMPDIR or /tmp. It is the same for every run, so that the logs of earlier runs can be
    found. If another user has created or can enter it, a new one is made."""
    from orchestrator.execution.cluster.ray_internals import get_default_system_temp_dir

    place = Path(get_default_system_temp_dir() or FALLBACK).absolute()
    if len(os.fsencode(place)) + LONGEST_SUFFIX > LONGEST_SOCKET:
        place = Path(FALLBACK)
    try:
        place.mkdir(parents=True, exist_ok=True)
        folder = place / f"fedsweep-{os.geteuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder if is_private(folder, stat.S_IFDIR) else Path(tempfile.mkdtemp(prefix="fedsweep-", dir=place))
    except OSError as error:
        raise UserError(f"Ray needs a folder in {place}: {error.strerror}; set RAY_TMPDIR to another place") from None
