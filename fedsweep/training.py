"""One model from Python: trained weights, how they did, and what they cost in privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.execution import training
from trainables.errors import UserError
from trainables.federation.lane_result import LaneResult
from trainables.federation.saved_model import SavedModel
from trainables.privacy.plan import Adjacency, Clipping, Level, Release
from trainables.spec import Aggregate, HyperValue


@dataclass(frozen=True)
class Account:
    """The privacy of a run."""

    claimed: float
    """The eps that was asked for."""
    actual: Mapping[Release, float]
    """The eps that the added noise provides, by release model: local, secure-aggregation."""
    unsampled: Mapping[Release, float]
    """The same to one who knows which rows, or users, were sampled."""
    delta: float
    noise_multiplier: float


@dataclass(frozen=True)
class Model:
    """A training run that has ended."""

    state: str
    """done, or diverged."""
    weights: NDArray[np.float32] | None
    """As the head lays them out: of a linear head (features + 1) x classes, the last row added to every row's score.
    None where the run diverged."""
    metrics: Mapping[str, Mapping[int, float]]
    """By name and round: accuracy, loss, train_loss, …"""
    account: Account
    hyperparameters: Mapping[str, HyperValue]
    seconds_per_round: float
    key: str | None
    """Names everything that can change this result; None of a run with secret noise."""
    _saved: SavedModel | None = field(repr=False)

    @property
    def accuracy(self) -> float | None:
        """After the last round, in percent; None where labels are no classes."""
        found = self.metrics.get("accuracy") or {}
        return found[max(found)] if found else None

    def predict(self, x: NDArray[np.float32]) -> NDArray[np.int64]:
        """The likeliest class of every row of features, as they came."""
        return self._kept().predict(x)

    def save(self, path: str | Path) -> None:
        """Keep it in an .npz file, with where it is from and its account, as `fedsweep train --save` does; `fedsweep
        predict` reads it."""
        self._kept().save(Path(path))

    def _kept(self) -> SavedModel:
        if self._saved is None:
            raise UserError(f"the run ended as {self.state!r}: there is no model")
        return self._saved


def load_model(path: str | Path) -> SavedModel:
    """A model that `save`, or `fedsweep train --save`, has kept: its weights, `predict`, `scores` and `provenance`."""
    return SavedModel.load(Path(path))


def train(
    data: str | Path | Mapping[str, NDArray[Any]],
    *,
    method: str,
    epsilon: float | None = None,
    mu: float | None = None,
    hyperparameters: Mapping[str, HyperValue] | None = None,
    delta: float = 1e-5,
    clip: float = 10.0,
    clipping: Clipping = "plain",
    release: Release = "local",
    adjacency: Adjacency = "replace-one",
    level: Level = "record",
    secret_participation: float = 1.0,
    center: float = 0.0,
    center_bound: float = 16.0,
    aggregate: Aggregate = "uniform",
    model: str = "softmax",
    partition: str = "dirichlet:0.5",
    clients: int = 20,
    partition_seed: int = 42,
    rounds: int = 70,
    evaluate_every: int = 10,
    train_on: str = "all",
    evaluate_on: str = "test",
    validation_fraction: float = 0.1,
    seed: int = 42,
    secret_noise: bool = False,
    hosts: int | None = None,
    address: str | None = None,
    on_round: Callable[[int, LaneResult], None] = lambda t, result: None,
) -> Model:
    """Train one federation; the arguments are the options of `fedsweep train`, by the same names and with the same
    defaults. The budget is stated as `epsilon` or as `mu`.

    `data`: a feature file, the name of a built-in set, or the arrays themselves (x_train, y_train, x_test, y_test and,
    if rows belong to clients, client_train).
    `center`: the share of mu squared for a private mean that is taken off the features; weights are those for features
    as they came.
    `secret_noise`: the seed of noise and weights comes from the operating system, and nobody is told it.
    """
    prepared = training.set_up(
        data if isinstance(data, Mapping) else str(data),
        method=method,
        hyperparameters=hyperparameters or {},
        epsilon=epsilon,
        mu=mu,
        delta=delta,
        clip=clip,
        clipping=clipping,
        release=release,
        adjacency=adjacency,
        level=level,
        secret_participation=secret_participation,
        center=center,
        center_bound=center_bound,
        aggregate=aggregate,
        model=model,
        partition=partition,
        clients=clients,
        partition_seed=partition_seed,
        rounds=rounds,
        evaluate_every=evaluate_every,
        train_on=train_on,
        evaluate_on=evaluate_on,
        validation_fraction=validation_fraction,
        seed=seed,
        secret_noise=secret_noise,
        hosts=hosts,
        address=address,
    )
    trained = training.train(prepared, address=address, hosts=hosts, on_round=on_round)
    trial, plan = prepared.trial, prepared.plan
    return Model(
        state=trained.result.state,
        weights=trained.weights,
        metrics=trained.result.metrics,
        account=Account(trial.privacy.epsilon, plan.actual_epsilon, plan.unsampled, delta, plan.noise_multiplier),
        hyperparameters=trial.hyperparameters,
        seconds_per_round=trained.seconds_per_round,
        key=None if secret_noise else trial.key,
        _saved=None if trained.weights is None else training.saved_model(prepared, trained, secret=secret_noise),
    )
