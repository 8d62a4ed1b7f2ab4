"""DP-BandMF: clients take turns, and the noise is correlated across rounds by a banded matrix factorisation.

    round t:  client i releases k (g_i + z_t + d_1 z_{t-1} + ... + d_{p-1} z_{t-p+1}) / |D_i|;  theta <- theta - eta G

k is `every`, p is `bands`; g_i is the sum of clipped gradients if it is the client's turn (every k rounds), else 0; z_t
is fresh noise of round t; d_j are the coefficients of sqrt(1 - x), which are negative for j > 0, so that most of the
noise cancels in the sum of all rounds (Kalinin et al. 2025; banded factorisations: Choquette-Choo et al. 2023).

With D the banded matrix of the d_j and C its inverse, the releases are D (C g + z). A record affects g only in its
client's turns. Columns of C that are `every` rounds apart overlap little, which keeps the sensitivity of C g low. If
every client is in every round, independent noise is optimal (docs/design-notes.md): `bands: 1`.

All clients release something in all rounds, noise alone if it is not their turn, so a sum has the noise of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from trainables.lazy import torch
from trainables.methods.base import (
    ClientProgram,
    ClientRound,
    Hyperparameter,
    Hypers,
    Method,
    Run,
    State,
    learning_rate,
)
from trainables.privacy.plan import Event, Level


def band(bands: int) -> list[float]:
    """d_0 = 1, d_1, ..., d_{bands-1}: the power series of sqrt(1 - x)."""
    d = [1.0]
    for j in range(1, bands):
        d.append(d[-1] * (2 * j - 3) / (2 * j))
    return d


@lru_cache(maxsize=256)
def sensitivity(rounds: int, every: int, bands: int) -> float:
    """l2 sensitivity of C g for a record that changes g by at most 1 in each of its client's turns.

    The maximum is ||C u||, u the indicator of the turns of the first client. All entries of C are non-negative, since
    all d_j but d_0 are negative; so changes in the same direction in all turns are the worst case. For other clients
    the same vector starts later and is cut off earlier."""
    from scipy.signal import lfilter  # takes a second to import, and client hosts do not need it

    turns = np.zeros(rounds)
    turns[::every] = 1
    return float(np.linalg.norm(lfilter([1.0], band(min(bands, rounds)), turns)))


@dataclass(frozen=True)
class BandedGradient(ClientProgram):
    """The gradient if it is the client's turn, plus correlated noise."""

    every: int
    bands: int

    @property
    def name(self) -> str:
        return f"gradient every {self.every} rounds, noise in {self.bands} bands"

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        # the factor `every` turns the mean over all clients into a mean over the clients whose turn it is
        total = client.clipped_gradient_sum(theta) * client.turn_mask(self.every) * self.every
        for back, factor in enumerate(band(self.bands)[: client.t]):
            total = total + client.noise("banded", t=client.t - back, factor=factor * self.every)
        return (total / client.size).to(theta)


class DPBandMF(Method):
    name = "dp-bandmf"
    title = "DP-BandMF"
    paper = "Choquette-Choo et al. 2023, the factors of Kalinin et al. 2025"
    hyperparameters = (
        learning_rate(0.1),
        Hyperparameter(
            "every", 5, "rounds from one turn of a client to the next; 1: all clients in every round; if there are "
            "fewer clients than that, some rounds are noise alone", low=1, integer=True, high=10**4, shared=True,
        ),
        Hyperparameter(
            "bands", 0, "rounds that share a noise; 0: as many as `every`; 1: independent noise", low=0,
            integer=True, high=10**4, shared=True,
        ),
    )  # fmt: skip

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return BandedGradient(*_shape(hypers))

    def releases(self, run: Run) -> tuple[Event, ...]:
        return (Event("banded", 1, run.privacy.sensitivity * sensitivity(run.rounds, *_shape(run.hypers))),)

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        return theta - hypers["learning_rate"] * G


def _shape(hypers: Hypers) -> tuple[int, int]:
    every = int(hypers["every"])
    return every, int(hypers["bands"]) or every
