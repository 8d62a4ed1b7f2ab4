"""DP-FTRL's tree, by brute force on few rounds: which noises a prefix carries, and how far one record moves them."""

import itertools
import math

import numpy as np
import pytest
import small
import torch

from trainables.federation.pack import plan_of
from trainables.methods.dp_ftrl import TreeGradient

EVERY = [(rounds, restart) for rounds in (1, 2, 3, 5, 8, 11) for restart in (0, 1, 3, 4)]
every_tree = pytest.mark.parametrize(("rounds", "restart"), EVERY)


class Ledger:
    """A client without rows: instead of drawing noise it writes down which one was asked for."""

    def __init__(self, rounds):
        self.rounds, self.size, self.columns = rounds, 1, {}

    def clipped_gradient_sum(self, theta):
        return torch.zeros(10 * self.rounds, dtype=torch.float64)

    def noise(self, purpose, step=0, t=None, factor=1):
        assert purpose == "tree"
        place = self.columns.setdefault((self.t if t is None else t, step), len(self.columns))
        one = torch.zeros(10 * self.rounds, dtype=torch.float64)
        one[place] = factor
        return one


def prefix_noises(rounds, restart):
    """(prefix, noise): the unit noises in the sum of the client's first t releases."""
    client = Ledger(rounds)
    program, releases = TreeGradient(restart), []
    for t in range(1, rounds + 1):
        client.t = t
        releases.append(program.round(client, None))
    return torch.stack(releases).cumsum(0).numpy()[:, : len(client.columns)]


def nodes_of(t, span):
    """The dyadic intervals that 1..t falls into, tree by tree: the largest that fits, then the largest in the rest."""
    found = set()
    for start in range(0, t, span):
        here, end = start, min(start + span, t)
        while here < end:
            length = 2 ** int(math.log2(end - here))
            found.add((here, here + length))
            here += length
    return found


@every_tree
def test_covariance_of_the_prefixes(rounds, restart):
    """Two prefixes share the noises of the intervals they share, each once; so a prefix has as many as t has binary
    digits that are one, and none is ever counted twice."""
    noises = prefix_noises(rounds, restart)
    nodes = [nodes_of(t, restart or rounds) for t in range(1, rounds + 1)]
    shared = [[len(a & b) for b in nodes] for a in nodes]
    assert (noises @ noises.T == shared).all()
    assert set(np.unique(noises)) <= {0.0, 1.0}
    if not restart:
        assert [len(node) for node in nodes] == [t.bit_count() for t in range(1, rounds + 1)]


@every_tree
def test_sensitivity_is_the_most_that_one_record_can_do(rounds, restart):
    """A record moves the gradient of every round by at most 1 (times 2C), the prefixes by sums of that. Seen against
    the prefixes' noise N, that is the length of N^+ (prefix sums of the moves). A convex function of the moves: its
    maximum is at a corner, every corner is tried, and it is where all rounds move alike."""
    undo = np.linalg.pinv(prefix_noises(rounds, restart))
    sums = np.tril(np.ones((rounds, rounds)))
    corners = np.array(list(itertools.product((-1.0, 1.0), repeat=rounds)))
    most = np.linalg.norm(corners @ sums.T @ undo.T, axis=1).max()
    trial = small.trial(small.problem(), "dp-ftrl", {"restart_every": restart}, rounds=rounds, clip=10.0)
    (event,) = plan_of(trial, [5, 5]).events
    assert event.sensitivity == pytest.approx(20 * most, rel=1e-9)
    # moves in several dimensions gain nothing: what they are weighed with has no negative entry
    weighed = undo @ sums
    assert (weighed.T @ weighed > -1e-9).all()


# ---- why independent noise is better where every record is in every round


def least_error(A):
    """What no factorisation of A falls below: the nuclear norm of A K^(1/2), K the inner products of A's columns, each
    of length 1."""
    unit = A / np.linalg.norm(A, axis=0)
    values, vectors = np.linalg.eigh(unit.T @ unit)
    root = vectors @ np.diag(np.sqrt(values.clip(0))) @ vectors.T
    return np.linalg.norm(A @ root, "nuc")


def diagonal_error(A, variances):
    """Independent noise in every round: the norm of the errors, times the cost of a record that is in every round."""
    return math.sqrt((np.square(A).sum(0) * variances).sum() * (1 / variances).sum())


@pytest.mark.parametrize("rounds", [2, 5, 70])
def test_no_factorisation_is_better_than_a_schedule(rounds):
    """Of the last weights, of all prefix sums, and of the weights after every round."""
    prefixes = np.tril(np.ones((rounds, rounds)))
    for A in (prefixes[-1:] / rounds, prefixes, prefixes / np.arange(1, rounds + 1)[:, None]):
        lengths = np.linalg.norm(A, axis=0)
        assert diagonal_error(A, 1 / lengths) == pytest.approx(lengths.sum()) == pytest.approx(least_error(A), rel=1e-6)
        tree = prefix_noises(rounds, 0)  # every prefix sum as a sum of noises; a record moves all nodes
        undone = A @ np.linalg.inv(prefixes) @ tree
        moved = np.linalg.pinv(tree) @ prefixes @ np.ones(rounds)
        assert np.linalg.norm(undone) * np.linalg.norm(moved) >= least_error(A) * (1 - 1e-9)


def test_independent_noise_is_the_best_schedule_for_the_last_weights():
    """Every round's noise is the same, and its price is that of the least error: dp-ftrl pays nothing on top."""
    trial = small.trial(small.problem(), "dp-ftrl", {"noise": "independent"}, rounds=70, epsilon=0.5)
    plan = plan_of(trial, [5, 5])
    last = np.full((1, 70), 1 / 70)
    std = plan.noise_std["gradient"]
    error = diagonal_error(last, np.full(70, std**2))
    assert error == pytest.approx(least_error(last))
    # the error of the last weights times mu is the least error times what a record moves a gradient by
    assert std / math.sqrt(70) * plan.mu("local") == pytest.approx(least_error(last) * trial.privacy.sensitivity)
