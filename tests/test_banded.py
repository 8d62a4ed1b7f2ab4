"""DP-BandMF by brute force on few rounds: how far one record moves what is released, and what the bands save."""

import itertools
import math

import numpy as np
import pytest
import small
import torch

from trainables.federation.pack import plan_of
from trainables.methods.dp_bandmf import BandedGradient

SHAPES = [(every, bands) for every in (1, 2, 3, 5) for bands in (0, 1, 2, 4)]


class Ledger:
    """A client without rows: instead of drawing noise it writes down how much of which one was asked for."""

    size = 1

    def __init__(self, number, rounds):
        self.number, self.rounds = number, rounds

    def clipped_gradient_sum(self, theta):
        return torch.zeros(2 * self.rounds, dtype=torch.float64).index_fill(
            0, torch.tensor(self.rounds + self.t - 1), 1
        )

    def turn_mask(self, every):
        return float((self.t - 1 - self.number) % every == 0)

    def noise(self, purpose, step=0, t=None, factor=1):
        assert (purpose, step) == ("banded", 0)
        return torch.zeros(2 * self.rounds, dtype=torch.float64).index_fill(0, torch.tensor(t - 1), factor)


def released(number, rounds, every, bands):
    """(round, noise) and (round, gradient): what a client's releases are made of."""
    client, program, found = Ledger(number, rounds), BandedGradient(every, bands or every), []
    for client.t in range(1, rounds + 1):
        found.append(program.round(client, torch.zeros(1, dtype=torch.float64)))
    return np.hsplit(torch.stack(found).numpy(), 2)


@pytest.mark.parametrize("rounds", [1, 2, 5, 8])
@pytest.mark.parametrize(("every", "bands"), SHAPES)
def test_sensitivity_is_the_most_that_one_record_can_do(rounds, every, bands):
    """Seen against their noise N, moves x of the gradients are as long as N^-1 S x, S being what of them is released.
    It is convex in x: the most is at a corner. Every corner is tried, of every client."""
    corners = np.array(list(itertools.product((-1.0, 1.0), repeat=rounds)))
    most = 0.0
    for number in range(every):
        noise, signal = released(number, rounds, every, bands)
        most = max(most, np.linalg.norm(corners @ np.linalg.solve(noise, signal).T, axis=1).max())
    trial = small.trial(small.problem(), "dp-bandmf", {"every": every, "bands": bands}, rounds=rounds, clip=10.0)
    (event,) = plan_of(trial, [5, 5]).events
    assert event.sensitivity == pytest.approx(20.0 * most, rel=1e-9)


def test_turns_in_any_directions_cost_no_more():
    """The moves of a record are vectors: with K their inner products the squared length is tr(K M), M having no
    negative entries, so that K of all ones is the most."""
    for every, bands in SHAPES:
        noise, signal = released(0, 8, every, bands)
        M = np.linalg.solve(noise, signal)
        assert (M.T @ M).min() >= -1e-12


def last_error(every, bands, rounds=70):
    """Of the sum of all releases, at the same budget: its noise times the sensitivity."""
    noise, signal = released(0, rounds, every, bands)
    moves = np.linalg.norm(np.linalg.solve(noise, signal).sum(1))
    return np.linalg.norm(noise.sum(0)) * moves


def test_bands_save_error_where_turns_are_rare_and_only_there():
    """4 of 20 clients in turn, 70 rounds: a good quarter of the squared error is left."""
    assert 0.25 < (last_error(5, 0) / last_error(5, 1)) ** 2 < 0.3
    assert all(last_error(1, bands) > last_error(1, 1) for bands in (2, 3, 5, 20))


@pytest.mark.parametrize("release", ["local", "secure-aggregation"])
def test_the_actual_epsilon_is_the_claimed_one(release):
    of = small.problem()
    trial = small.trial(of, "dp-bandmf", rounds=70, epsilon=2.0, release=release)
    actual = plan_of(trial, of.partition.sizes).actual_epsilon[release]
    assert actual == pytest.approx(2.0, rel=1e-5)
    assert actual <= 2.0
    alone = plan_of(trial.model_copy(update={"hyperparameters": {**trial.hyperparameters, "bands": 1}}), [7, 7])
    (event,) = alone.events
    assert event.sensitivity == pytest.approx(10.0 * math.sqrt(14), rel=1e-9), "14 turns, each noised for itself"


def test_everybody_has_turns_as_often():
    """Over `every` rounds the clients' signals, in the mean over all, are those of one round with all clients."""
    for every in (1, 3, 5):
        for number in range(7):
            _, signal = released(number, 30, every, 0)
            assert (signal.sum(0) > 0).sum() == 30 // every
            assert signal.sum() == pytest.approx(30)
