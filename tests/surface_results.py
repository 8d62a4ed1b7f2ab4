"""Results of a study that the strategy `surface` has searched, with a pure function in place of training."""

import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import simulated_search
from simulated_search import drive, study

GD = {"name": "dp-fedgd", "coarse": {"learning_rate": [0.001, 0.1, 10]}, "fine": {"learning_rate": [0.1]}}


def accuracy(epsilon: float, rate: float) -> float:
    """The best learning rate is eps / 10, the best accuracy 60 + 3 ln eps."""
    return 60 + 3 * math.log(epsilon) - 9 * math.log10(10 * rate / epsilon) ** 2


def evaluate(trial):
    return "done", accuracy(trial.privacy.epsilon, trial.hyperparameters["learning_rate"]), 1.0


def write(folder: Path) -> None:
    """Budgets 1, 2 and 8. Secure aggregation hides half of eps."""
    made = simulated_search.row

    def row(trial, outcome):
        epsilon = trial.privacy.epsilon
        return replace(
            made(trial, outcome), epsilon_local=epsilon, epsilon_secure=epsilon / 2, epsilon_unsampled=epsilon
        )

    of = study(
        methods=[GD],
        epsilons=[1, 2, 8],
        seeds={"search": [1, 2], "contest": [11, 12], "confirm": [42]},
        search={"strategies": ["surface"], "trials": 14},
    )
    with mock.patch.object(simulated_search, "row", row):
        drive(folder, of, evaluate)
