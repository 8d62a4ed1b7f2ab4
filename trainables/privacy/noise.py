"""Noise that is addressed, not drawn.

The standard normal vector at an address is a pure function of it: whichever process asks, in whichever order, after
however many restarts, the bits are the same. The address is hashed into the key of Philox, a counter-based generator.
It holds nothing of the lane, so all trials of a seed see common noise, as a search with one fixed seed implies.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SERVER = -1  # the "client" of what the server draws, the initial weights for example


@dataclass(frozen=True)
class Address:
    seed: int
    client: int
    round: int
    step: int
    purpose: str

    def generator(self) -> np.random.Generator:
        """The generator that belongs to this address and to no other."""
        packed = struct.pack("<4q", self.seed, self.client, self.round, self.step) + self.purpose.encode()
        digest = hashlib.blake2b(packed, digest_size=16, person=b"fedsweep-noise").digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))

    def normal(self, size: int) -> NDArray[np.float32]:
        """`size` independent standard normal numbers."""
        return self.generator().standard_normal(size, dtype=np.float32)
