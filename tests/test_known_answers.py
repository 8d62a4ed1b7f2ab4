"""Known accuracies: the authors' tuned values on the paper's own features, seed 42, round 70 (data/README.md).

All nine runs are lanes of one pack. Our noise differs from the authors', so the tolerances are 0.8 points at eps 5
and 10, 1.5 at eps 1 and 3 at eps 0.5.
"""

import pytest
import small

from trainables.federation.problem import ProblemData
from trainables.federation.server import run_pack

TUNED = {  # DP-FedSOFIM, CIFAR-10 / ResNet-20
    0.5: {"learning_rate": 0.2, "rho": 0.5, "beta": 0.95},
    1: {"learning_rate": 3.0, "rho": 10.0, "beta": 0.8},
    5: {"learning_rate": 0.8, "rho": 0.5, "beta": 0.9},
    10: {"learning_rate": 0.8, "rho": 0.5, "beta": 0.9},
}
KNOWN = {
    "dp-fedgd": {10: 64.7, 5: 64.5, 1: 62.0, 0.5: 57.5},
    "dp-fedsofim": {10: 68.3, 5: 67.2, 1: 62.1, 0.5: 56.1},
}
TOLERANCE = {10: 0.8, 5: 0.8, 1: 1.5, 0.5: 3.0}

pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def results(shared_data):
    """Results by (method, eps); those of the published update direction under "gradient"."""
    of = small.problem(data=str(shared_data("cifar10-resnet20.npz")), partition="dirichlet:0.5", clients=20)
    run = {"rounds": 70, "every": 10, "clip": 10.0, "seed": 42}
    trials = {
        (method, epsilon): small.trial(
            of, method, {"learning_rate": 0.1} if method == "dp-fedgd" else TUNED[epsilon], epsilon=epsilon, **run
        )
        for method, answers in KNOWN.items()
        for epsilon in answers
    }
    published = {**TUNED[10], "direction": "gradient"}
    trials["gradient"] = small.trial(of, "dp-fedsofim", published, epsilon=10.0, **run)
    outcomes = run_pack(list(trials.values()), ProblemData.of(of))
    return {name: outcomes[trial.key] for name, trial in trials.items()}


@pytest.mark.parametrize(("method", "epsilon"), [(m, e) for m, answers in KNOWN.items() for e in answers])
def test_round_70(results, method, epsilon):
    result = results[method, epsilon]
    assert result.state == "done"
    assert list(result.metrics["accuracy"]) == [10, 20, 30, 40, 50, 60, 70]
    assert result.metrics["accuracy"][70] == pytest.approx(KNOWN[method][epsilon], abs=TOLERANCE[epsilon])


def test_the_published_direction_diverges(results):
    """A = G with the tuned values of eps 10: below 15 percent at the end (or NaN earlier), while A = M^ reaches 68."""
    result = results["gradient"]
    last = list(result.metrics["accuracy"].values())[-1]
    assert result.state == "diverged" or last < 15
    assert last < 15
