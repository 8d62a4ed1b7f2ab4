"""Which clients take part in a round.

Public participation (`participants`): the server samples clients from the seed. The account counts the rounds of the
client that takes part most often, without credit for sampling.
Secret participation (`takes_part`): every client draws its own secret coin. The account credits it if only the sum is
visible, because the client's noise is in the sum either way.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from trainables.privacy.noise import SERVER, Address, keyed


def cohort(clients: int, share: float) -> int:
    """Number of clients in a round."""
    return max(1, round(share * clients))


@lru_cache(maxsize=256)  # enough for one round of all seeds of a pack
def participants(seed: int, t: int, clients: int, share: float) -> NDArray[np.bool_]:
    """(clients,): whether each client takes part in round t."""
    chosen = np.ones(clients, dtype=bool)
    if cohort(clients, share) < clients:
        drawn = Address(seed, SERVER, t, 0, "participants").generator().permutation(clients)
        chosen[drawn[cohort(clients, share) :]] = False
    chosen.flags.writeable = False
    return chosen


@lru_cache(maxsize=4096)
def most_rounds(seed: int, rounds: int, clients: int, share: float) -> int:
    """The largest number of rounds that any client takes part in."""
    if cohort(clients, share) == clients:
        return rounds
    counts = np.zeros(clients, dtype=np.int64)
    for t in range(1, rounds + 1):
        counts += participants.__wrapped__(seed, t, clients, share)
    return int(counts.max())


def takes_part(seed: int, client: int, t: int, probability: float, key: str = "") -> bool:
    """The client's secret coin in round t."""
    return bool(Address(seed, client, t, 0, keyed("takes part", key)).generator().random() < probability)
