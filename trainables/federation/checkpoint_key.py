"""The key that authenticates a user's checkpoints and the secrets of private searches.

A results folder may come from anyone. The author of a checkpoint chooses the weights and the round that a private trial
continues from, and a person who knows the secret of a private search can subtract its noise. So only checkpoints and
secrets of the user's own runs are trusted. The key lies outside of all results folders.
"""

from __future__ import annotations

import logging
import secrets
import stat
from functools import cache

from trainables.files import PRIVATE, is_private, replacing, trusted_user_folder

SIZE = 32  # bytes
log = logging.getLogger("fedsweep")


@cache
def user_key() -> bytes:
    """The user's key, created on first use. If it cannot be stored, a key for this process only: later runs then start
    packs from round 0."""
    try:
        folder = trusted_user_folder("XDG_STATE_HOME", ".local", "state")
        file = folder / "checkpoint.key"
        if not is_private(file, stat.S_IFREG) or file.stat().st_size != SIZE:
            with replacing(file, mode=PRIVATE, durable=True) as made:
                made.write(secrets.token_bytes(SIZE))
        return file.read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        log.warning("the checkpoint key cannot be stored, so later runs refuse this run's checkpoints: %s", error)
        return secrets.token_bytes(SIZE)
