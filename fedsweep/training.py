"""One model from Python: trained weights, how they did, and what they cost in privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.running import training
from trainables import methods
from trainables.data import features
from trainables.data import partition as partitions
from trainables.privacy.plan import Adjacency, Level, PrivacySettings, Release
from trainables.server import LaneResult
from trainables.spec import HyperValue


@dataclass(frozen=True)
class Account:
    """The privacy of a run."""

    claimed: float
    """The eps that was asked for."""
    bought: Mapping[Release, float]
    """The eps that the noise really buys, by who is not trusted: local, secure-aggregation."""
    unsampled: Mapping[Release, float]
    """The same to one who knows which rows were sampled."""
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
    key: str
    """Names everything that can change this result."""

    @property
    def accuracy(self) -> float | None:
        """After the last round, in percent; None where labels are no classes."""
        found = self.metrics.get("accuracy") or {}
        return found[max(found)] if found else None


def train(
    data: str | Path | Mapping[str, NDArray[Any]],
    *,
    method: str,
    epsilon: float,
    hyperparameters: Mapping[str, HyperValue] | None = None,
    delta: float = 1e-5,
    clip: float = 10.0,
    release: Release = "local",
    adjacency: Adjacency = "replace-one",
    level: Level = "record",
    model: str = "softmax",
    partition: str = "dirichlet:0.5",
    clients: int = 20,
    partition_seed: int = 42,
    rounds: int = 70,
    evaluate_every: int = 10,
    train_on: str = "all",
    evaluate_on: str = "test",
    seed: int = 42,
    hosts: int | None = None,
    address: str | None = None,
    on_round: Callable[[int, LaneResult], None] = lambda t, result: None,
) -> Model:
    """Train one federation; the arguments are named as the options of `fedsweep train`, which has more of them: centred
    features, weights by size and secret noise are the command's alone.

    `data`: a feature file, the name of a built-in set, or the arrays themselves (x_train, y_train, x_test, y_test and,
    if rows belong to clients, client_train).
    """
    privacy = PrivacySettings(
        epsilon=epsilon, delta=delta, clip=clip, release=release, adjacency=adjacency, level=level
    ).check()
    dealt = partitions.parse(partition, clients=clients, seed=partition_seed)
    chosen = methods.get(method).check(hyperparameters or {})
    loaded = features.from_arrays(data) if isinstance(data, Mapping) else features.load(str(data), seed)
    prepared = training.prepare(
        loaded,
        partition=dealt,
        model=model,
        train_on=train_on,
        evaluate_on=evaluate_on,
        method=method,
        hyperparameters=chosen,
        privacy=privacy,
        rounds=rounds,
        evaluate_every=evaluate_every,
        seed=seed,
    )
    trained = training.train(prepared, address=address, hosts=hosts, on_round=on_round)
    plan = prepared.plan
    return Model(
        state=trained.result.state,
        weights=trained.weights,
        metrics=trained.result.metrics,
        account=Account(epsilon, plan.bought, plan.unsampled, delta, plan.noise_multiplier),
        hyperparameters=chosen,
        seconds_per_round=trained.seconds_per_round,
        key=prepared.trial.key,
    )
