"""A plug-in with one method, one data source and one partition. docs/write-a-method.md explains it.

fedsweep check-method examples/plugin/heavy_ball.py:DPHeavyBall --twin examples/plugin/heavy_ball.py:twin
fedsweep --import examples/plugin/heavy_ball.py run examples/plugin/study.yaml --results results/heavy-ball
"""

from __future__ import annotations

import numpy as np
import torch

from fedsweep.plugins import (
    FeatureSet,
    Hyperparameter,
    Hypers,
    Method,
    PartitionSpec,
    Rows,
    State,
    data_source,
    learning_rate,
    partition,
)


class DPHeavyBall(Method):
    """Polyak's heavy ball on the mean of the clients' noisy gradients."""

    name = "dp-heavy-ball"
    title = "DP-HeavyBall"
    paper = "Polyak 1964"
    hyperparameters = (
        learning_rate(0.5),
        Hyperparameter("momentum", 0.5, "fraction of the last step that is repeated", low=0, high=1, open_high=True),
    )

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        return {"velocity": torch.zeros_like(theta)}

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        state["velocity"] = hypers["momentum"] * state["velocity"] - hypers["learning_rate"] * G
        return theta + state["velocity"]


def twin(W, G, t, state, *, learning_rate, momentum):
    """The same step for one model in NumPy; `check-method` compares both."""
    state["velocity"] = momentum * state.get("velocity", 0.0) - learning_rate * G
    return W + state["velocity"]


@data_source("two-moons")
def two_moons(parameter: str) -> dict[str, np.ndarray]:
    """`two-moons:ROWS`: two half circles, one per class, with products of the features that separate them linearly."""
    rows = int(parameter or 600)
    rng = np.random.default_rng(0)
    label = np.arange(rows) % 2
    angle = rng.uniform(0, np.pi, rows)
    x = np.where(label == 0, np.cos(angle), 1 - np.cos(angle)) + rng.normal(0, 0.1, rows)
    y = np.where(label == 0, np.sin(angle), 0.5 - np.sin(angle)) + rng.normal(0, 0.1, rows)
    features = np.stack([x, y, x * y, x**2, y**2], axis=1).astype(np.float32)
    test = rows // 5
    return {
        "x_train": features[test:],
        "y_train": label[test:],
        "x_test": features[:test],
        "y_test": label[:test],
    }


@partition("by-first-feature")
def by_first_feature(data: FeatureSet, spec: PartitionSpec) -> list[Rows]:
    """Each client holds one range of the first feature; all clients have about the same size."""
    order = np.argsort(data.x_train[:, 0], kind="stable")
    return list(np.array_split(order, spec.clients))
