"""Runs a trial with the fast code and with its slow twin, and compares the two."""

import numpy as np
import pytest
import small
import twin
import twin_sampled

from trainables.federation.pack import plan_of
from trainables.methods import METHODS

ROUNDS = 20


def twin_of(trial, of, train=None):
    """The same trial, run by the twin."""
    plan = plan_of(trial, of.partition.sizes)
    clients = [
        twin.Client(
            number,
            of.data.x_train[rows],
            of.data.y_train[rows],
            plan.noise_std,
            trial.privacy.clip,
            trial.seed,
            trial.privacy.level,
            len(rows) if trial.aggregate == "size" else 1.0,
        )
        for number, rows in enumerate(of.partition.rows)
    ]
    if trial.preprocess.center:
        clients, _ = twin.centred(clients, trial.preprocess.bound)
    hypers = METHODS[trial.method].resolve(dict(trial.hyperparameters), trial.privacy)
    if trial.method in twin_sampled.METHODS:
        return twin_sampled.train(
            clients, of.data.classes, trial.method, hypers, rounds=ROUNDS, planned=trial.rounds, diagnose_at=(10, 20)
        )
    train = train or twin.train
    return train(clients, of.data.classes, trial.method, hypers, rounds=ROUNDS, diagnose_at=(10, 20))


def assert_agrees(trial, of, train=None, device="cpu") -> None:
    """With our own kernel and with torch's. `train`: another twin's."""
    slow = twin_of(trial, of, train)
    for kernel in small.kernels_of(device):
        with small.computed_with(kernel, device):
            weights, server = small.weights_after(ROUNDS, [trial], of, device=device)
        assert_as(slow, weights[0], server.results[trial.key].metrics, of)


def assert_as(slow, fast: np.ndarray, metrics, of) -> None:
    scale = np.abs(slow.weights[-1]).max()
    np.testing.assert_allclose(fast, slow.weights[-1], rtol=0, atol=1e-5 * scale)
    assert len(slow.diagnostics) >= 6
    for (name, t), value in slow.diagnostics.items():
        assert metrics[name][t] == pytest.approx(value, rel=1e-4), (name, t)
    for t in (10, 20):
        W = slow.weights[t - 1]
        assert metrics["loss"][t] == pytest.approx(twin.mean_loss(W, of.x_eval, of.y_eval), rel=1e-4)
        # one row of a hundred may lie on the border
        assert metrics["accuracy"][t] == pytest.approx(twin.accuracy(W, of.x_eval, of.y_eval), abs=1.0)
