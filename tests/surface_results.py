"""Results of a study that the strategy `surface` has searched, with a pure function in place of training."""

import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import simulated_search
from simulated_search import drive, study

from orchestrator.results.ledger import Ledger, SettingFacts
from orchestrator.study.cells import PreparedStudy
from trainables.privacy.gaussian import epsilon_of, mu_of

ROUNDS = 6
"""Of a confirm run."""
GD = {"name": "dp-fedgd", "coarse": {"learning_rate": [0.001, 0.1, 10]}, "fine": {"learning_rate": [0.1]}}


def accuracy(epsilon: float, rate: float) -> float:
    """The best learning rate is eps / 10, the best accuracy 60 + 3 ln eps."""
    return 60 + 3 * math.log(epsilon) - 9 * math.log10(10 * rate / epsilon) ** 2


def evaluate(trial):
    """The accuracy depends on the noise of a round. So a search run, which has fewer rounds than a confirm run, scores
    as a confirm run with a larger eps."""
    mu = mu_of(trial.privacy.epsilon, trial.privacy.delta) * math.sqrt(ROUNDS / trial.rounds)
    return "done", accuracy(epsilon_of(mu, trial.privacy.delta), trial.hyperparameters["learning_rate"]), 1.0


def write(folder: Path) -> None:
    """Budgets 1, 2 and 8. Secure aggregation hides half of eps. There are 5,000 validation rows, so the model expects
    little noise."""
    made = simulated_search.row

    def row(trial, outcome):
        epsilon = trial.privacy.epsilon
        return replace(
            made(trial, outcome), epsilon_local=epsilon, epsilon_secure=epsilon / 2, epsilon_unsampled=epsilon
        )

    of = study(
        data=["synthetic-frozen:50000,20,6,3"],
        methods=[GD],
        epsilons=[1, 2, 8],
        seeds={"search": [1, 2], "contest": [11, 12], "confirm": [42]},
        search={"strategies": ["surface"], "trials": 14},
    )
    with mock.patch.object(simulated_search, "row", row):
        drive(folder, of, evaluate)
    with Ledger.write(folder) as ledger:
        prepared = PreparedStudy.prepare(of)
        rows = {setting.id: prepared.validation_rows(setting) for setting in prepared.settings}
        ledger.add_settings({setting: SettingFacts(count, 20, 1) for setting, count in rows.items()})
