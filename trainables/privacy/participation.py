"""Which clients take part in a round.

The choice follows from the seed alone. The server makes it and everybody may know it, so a client's account counts the
rounds it takes part in and gets no credit for chance. But where a client throws a coin of its own and tells nobody how
it fell (`takes_part`), and only a sum is seen in which its noise is anyhow, the secret is worth something.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from trainables.privacy.noise import SERVER, Address


def cohort(clients: int, share: float) -> int:
    """How many take part."""
    return max(1, round(share * clients))


@lru_cache(maxsize=256)  # a round's, for the seeds of a pack: what was before is drawn anew by whoever repeats it
def participants(seed: int, t: int, clients: int, share: float) -> NDArray[np.bool_]:
    """Of every client, whether it takes part."""
    chosen = np.ones(clients, dtype=bool)
    if cohort(clients, share) < clients:
        drawn = Address(seed, SERVER, t, 0, "participants").generator().permutation(clients)
        chosen[drawn[cohort(clients, share) :]] = False
    chosen.flags.writeable = False
    return chosen


@lru_cache(maxsize=4096)
def most_rounds(seed: int, rounds: int, clients: int, share: float) -> int:
    """How many rounds the busiest client takes part in."""
    if cohort(clients, share) == clients:
        return rounds
    taken = np.zeros(clients, dtype=np.int64)
    for t in range(1, rounds + 1):
        taken += participants.__wrapped__(seed, t, clients, share)
    return int(taken.max())


def takes_part(seed: int, client: int, t: int, probability: float) -> bool:
    """Whether a client's own coin says so in round t."""
    return bool(Address(seed, client, t, 0, "takes part").generator().random() < probability)
