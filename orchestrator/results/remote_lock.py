"""The lock of a results folder at a URL: one driver at a time.

The lock is an object with the holder's token and the time of its last heartbeat. It expires if it is not renewed. A
driver takes over an expired lock by creating a second object, named after the expired token, which only one driver can
do: storage refuses to create an object that exists. So of several drivers one wins, and a driver that was suspended
notices that it has lost the lock. On S3, a renewal replaces the lock only if it has not changed. Elsewhere, the driver
reads the lock right before and after it writes: a lock that it has overwritten in between is still known from the
second object.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import time
from typing import Any, NamedTuple

from trainables.errors import UserError

TOKEN = re.compile(r"[0-9a-f]{16}")
EXPIRES_S = 120.0  # several heartbeats
PATIENCE_S = 5.0  # for a lock that is being written: not every file system writes atomically
LOCK = "remote.lock"


class LockLostError(UserError):
    """Another driver has taken over."""


class Holder(NamedTuple):
    """The driver that a lock names."""

    name: str
    token: str
    alive: float
    """The time of its last heartbeat, by its own clock."""

    @property
    def age(self) -> float:
        """Negative if its clock is ahead of ours."""
        return time.time() - self.alive

    @property
    def is_valid(self) -> bool:
        return self.age < EXPIRES_S

    @classmethod
    def parse(cls, content: bytes) -> Holder:
        """Raises ValueError for an invalid name, and for an invalid token, because tokens become parts of paths."""
        fields = json.loads(content)
        name, token, alive = str(fields["holder"]), str(fields["token"]), float(fields["alive"])
        if not TOKEN.fullmatch(token) or not name.isprintable():
            raise ValueError(f"{token!r:.50} is not a token, or {name!r:.50} is not a name")
        return cls(name, token, alive)


class RemoteLock:
    def __init__(self, files: Any, root: str, url: str) -> None:
        self._files, self._path, self._url = files, f"{root}/{LOCK}", url
        self.name = f"process {os.getpid()} on {socket.gethostname()}"
        self.token = secrets.token_hex(8)
        self._version = ""
        """The ETag of this driver's last write; empty if the storage has none."""
        self._taken_over = ""
        """The token of the expired lock that this one replaces."""

    def content(self) -> bytes:
        return json.dumps({"holder": self.name, "token": self.token, "alive": time.time()}).encode()

    def holder(self) -> Holder | None:
        """Who holds the lock, or held it last and did not release it."""
        holder, seen = self._read(self._path), set[str]()
        while holder is not None and (successor := self._read(f"{self._path}.{holder.token}")) is not None:
            if holder.token in seen:
                raise ValueError(f"{self._path} has no last holder")
            seen.add(holder.token)
            holder = successor
        return holder

    def _read(self, path: str) -> Holder | None:
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                return Holder.parse(self._files.cat_file(path))
            except FileNotFoundError:
                return None
            except (ValueError, KeyError, TypeError):
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)

    def acquire(self) -> None:
        holder = None
        while holder is None:
            if self._create(self._path):
                return
            holder = self.holder()  # None: released meanwhile
        if holder.is_valid or not self._create(f"{self._path}.{holder.token}"):
            raise UserError(f"results folder {self._url} is in use by {_described(holder)}")
        self._taken_over = holder.token
        self._write(self._path)

    def _create(self, path: str) -> bool:
        try:
            self._write(path, mode="create")
        except FileExistsError:
            return False
        return True

    def _write(self, path: str, **options: str) -> None:
        answer = self._files.pipe_file(path, self.content(), **options)
        self._version = answer.get("ETag", "") if isinstance(answer, dict) else ""

    def check(self) -> None:
        """Raise if another driver has taken over, even if it has finished since."""
        holder = self._read(self._path)
        successor = self._read(f"{self._path}.{self.token}")
        if successor is None and holder is not None and holder.token in (self.token, self._taken_over):
            return
        by = successor or holder
        raise LockLostError(
            f"results folder {self._url} was taken over by {by.name if by else 'another driver, which has finished'}"
        )

    def renew(self) -> None:
        self.check()
        if not self._version:
            self._write(self._path)
            self.check()
            return
        try:
            self._write(self._path, IfMatch=self._version)
        except OSError as error:
            # the lock has changed, perhaps by a write of this driver whose answer was lost; or the storage has no
            # conditional writes (ENOSYS)
            supported = error.errno != errno.ENOSYS
            self._version = self._files.info(self._path)["ETag"] if supported else ""
            self.check()
            raise

    def release(self) -> None:
        self.check()
        self._files.rm_file(self._path)
        if self._taken_over:
            self._files.rm_file(f"{self._path}.{self._taken_over}")


def _described(holder: Holder) -> str:
    if not holder.is_valid:
        return f"{holder.name}, whose lock another driver has just taken over"
    left = f"if that process has died, the lock expires in {EXPIRES_S - holder.age:.0f} s"
    if holder.age < 0:
        return f"{holder.name}, whose clock is {-holder.age:.0f} s ahead of this machine's; {left}"
    return f"{holder.name}, last heartbeat {holder.age:.0f} s ago; {left}"
