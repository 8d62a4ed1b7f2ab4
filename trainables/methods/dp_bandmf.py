"""DP-BandMF: gradients from some clients at a time, in turn, with noise that later rounds take back in part.

Round t adds z_t + d_1 z_(t-1) + ... + d_(p-1) z_(t-p+1) to a client's sum, z being noise of its own for every round and
d the series of sqrt(1 - x): of all rounds so far, added up, most of the noise then cancels (Kalinin et al. 2025; banded
factorisations are Choquette-Choo et al. 2023's). What is released is a factorisation of the gradients: with D the band
of the d and C its inverse, D (C gradients + z). A record shows in its client's turns alone, `every` rounds apart;
columns of C that lie apart overlap little, and that is what makes it cheap. Where a client is in every round nothing
beats noise of its own every round (docs/privacy.md), which is `bands: 1`.

All clients answer in all rounds, those whose turn it is not with noise alone: so a sum holds everybody's.
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
    """The series of sqrt(1 - x), as far as it goes."""
    found = [1.0]
    for j in range(1, bands):
        found.append(found[-1] * (2 * j - 3) / (2 * j))
    return found


@lru_cache(maxsize=256)
def sensitivity(rounds: int, every: int, bands: int) -> float:
    """How far one record moves C times the gradients, if it moves each round's of its client's turns by at most 1: the
    most that any client's turns allow. All d but the first are negative, so C has no negative entries: columns never
    work against each other, and a record that always moves the same way moves the most. That of the client whose turn
    comes first, for the others' moves are the same later, and cut off sooner."""
    from scipy.signal import lfilter  # a second of imports that a client host never needs

    turns = np.zeros(rounds)
    turns[::every] = 1
    return float(np.linalg.norm(lfilter([1.0], band(min(bands, rounds)), turns)))


@dataclass(frozen=True)
class BandedGradient(ClientProgram):
    """The gradient, if it is the client's turn, with this round's noise and part of that of those before."""

    every: int
    bands: int

    @property
    def name(self) -> str:
        return f"gradient every {self.every} rounds, noise in {self.bands} bands"

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        # the mean over all clients is then that of those whose turn it is
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
            "every", 5, "rounds from one turn of a client to its next; 1: all are in every round; with fewer clients "
            "than that, some rounds are noise alone", low=1, integer=True, high=10**4, shared=True,
        ),
        Hyperparameter(
            "bands", 0, "rounds that a noise is felt in; 0: as many as `every`; 1: in its own alone", low=0,
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
