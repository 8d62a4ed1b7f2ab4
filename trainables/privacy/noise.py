"""Noise that is addressed, not drawn.

The standard normal vector at an address is a pure function of it: whichever process asks, in whichever order, after
however many restarts, the bits are the same. The address is hashed into the key of Philox, a counter-based generator.
It holds nothing of the lane, so all trials of a seed see common noise, as a search with one fixed seed implies.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PERSON = b"fedsweep-noise"  # BLAKE2b's word for what it is used for
SERVER = -1  # the "client" of what the server draws, the initial weights for example


class _Reused(threading.local):
    """A generator that is set to one key after another: making one anew takes ten times as long."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._state = self._philox.state  # as it is before the first number
        self._generator = np.random.Generator(self._philox)

    def at(self, key: bytes) -> np.random.Generator:
        self._state["state"]["key"][:] = np.frombuffer(key, dtype="<u8")
        self._philox.state = self._state
        return self._generator


_REUSED = _Reused()


@dataclass(frozen=True)
class Address:
    seed: int
    client: int
    round: int
    step: int
    purpose: str

    def generator(self) -> np.random.Generator:
        """The generator that belongs to this address and to no other. To be used at once: the next address takes the
        same one over."""
        packed = struct.pack("<4q", self.seed, self.client, self.round, self.step) + self.purpose.encode()
        return _REUSED.at(hashlib.blake2b(packed, digest_size=16, person=PERSON).digest())

    def normal(self, size: int) -> NDArray[np.float32]:
        """`size` independent standard normal numbers."""
        return self.generator().standard_normal(size, dtype=np.float32)
