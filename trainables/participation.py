"""Which clients take part in a round.

The choice follows from the seed alone. The server makes it and everybody may know it, so a client's account counts the
rounds it takes part in and gets no credit for chance.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from trainables.privacy.noise import SERVER, Address


def cohort(clients: int, share: float) -> int:
    """How many take part."""
    return max(1, round(share * clients))


@lru_cache(maxsize=65536)
def participants(seed: int, t: int, clients: int, share: float) -> frozenset[int]:
    if cohort(clients, share) == clients:
        return frozenset(range(clients))
    drawn = Address(seed, SERVER, t, 0, "participants").generator().permutation(clients)
    return frozenset(drawn[: cohort(clients, share)].tolist())


@lru_cache(maxsize=4096)
def most_rounds(seed: int, rounds: int, clients: int, share: float) -> int:
    """How many rounds the busiest client takes part in."""
    taken = np.zeros(clients, dtype=np.int64)
    for t in range(1, rounds + 1):
        taken[list(participants(seed, t, clients, share))] += 1
    return int(taken.max())
