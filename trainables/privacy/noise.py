"""Noise as a pure function of its address (seed, client, round, step, purpose).

The address is hashed into the key of Philox, a counter-based generator. Every process gets the same bits, in any order
and after any restart. The lane is not part of the address, so all trials with the same seed use the same noise.
Secret noise has a secret key of 128 bits in its purpose (`keyed`): the seed alone then determines only what is public.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PERSON = b"fedsweep-noise"  # BLAKE2b personalisation
SERVER = -1  # the client number of server-side draws, e.g. initial weights


class _ReusedGenerator(threading.local):
    """One generator per thread, re-keyed for every address: creating a new one takes ten times as long."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._state = self._philox.state  # before the first draw
        self._generator = np.random.Generator(self._philox)

    def at(self, key: NDArray[np.uint64]) -> np.random.Generator:
        self._state["state"]["key"] = key
        self._philox.state = self._state
        return self._generator


_REUSED = _ReusedGenerator()


def keyed(purpose: str, key: str) -> str:
    """The purpose of a draw that can be repeated only with the key; without a key, the purpose itself."""
    return f"{purpose}:{key}" if key else purpose


@dataclass(frozen=True)
class Address:
    seed: int
    client: int
    round: int
    step: int
    purpose: str

    def generator(self) -> np.random.Generator:
        """The generator of this address. Use it at once: the next call re-keys the same object."""
        return _REUSED.at(_keys([self.seed], [self.client], self.round, self.step, self.purpose)[0])

    def normal(self, size: int) -> NDArray[np.float32]:
        """`size` independent standard normal numbers."""
        return self.generator().standard_normal(size, dtype=np.float32)


def fill_normals(
    out: NDArray[np.float32], clients: Sequence[int], seeds: Sequence[int], round: int, step: int, purpose: str
) -> None:
    """What `Address.normal` gives for all clients and seeds, (clients, seeds, size), in half the time."""
    keys = _keys(seeds, clients, round, step, purpose)
    for key, row in zip(keys, out.reshape(len(keys), -1), strict=True):
        _REUSED.at(key).standard_normal(dtype=np.float32, out=row)


def _keys(seeds: Sequence[int], clients: Sequence[int], round: int, step: int, purpose: str) -> NDArray[np.uint64]:
    """The key of Philox for every client and seed, client by client."""
    pack, name = struct.Struct("<4q").pack, purpose.encode()
    digests = [
        hashlib.blake2b(pack(seed, client, round, step) + name, digest_size=16, person=PERSON).digest()
        for client in clients
        for seed in seeds
    ]
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)
