"""`fedsweep frontier`: predictions at any budget, from the ledger of a surface search."""

import json
import math
from dataclasses import replace

import pytest
import simulated_search
from simulated_search import drive, study
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.execution.frontier import confirmed, read_surfaces
from orchestrator.report.tables.frontier import frontier
from orchestrator.report.tables.selection_table import selection
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results
from trainables.errors import UserError

GD = {"name": "dp-fedgd", "coarse": {"learning_rate": [0.001, 0.1, 10]}, "fine": {"learning_rate": [0.1]}}


def evaluate(trial):
    """The best learning rate is eps / 10, the best accuracy 60 + 3 ln eps."""
    epsilon, rate = trial.privacy.epsilon, trial.hyperparameters["learning_rate"]
    return "done", 60 + 3 * math.log(epsilon) - 9 * math.log10(10 * rate / epsilon) ** 2, 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = simulated_search.row

    def row(trial, outcome):
        epsilon = trial.privacy.epsilon
        return replace(
            made(trial, outcome), epsilon_local=epsilon, epsilon_secure=epsilon / 2, epsilon_unsampled=epsilon
        )

    results = tmp_path_factory.mktemp("frontier")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated_search, "row", row)
        drive(
            results,
            study(
                methods=[GD],
                epsilons=[1, 2, 8],
                seeds={"search": [1, 2], "contest": [11, 12], "confirm": [42]},
                search={"strategies": ["surface"], "trials": 14},
            ),
            evaluate,
        )
    return results


def test_a_budget_that_was_not_searched(folder):
    _, (surface,) = read_surfaces(folder)
    point = surface.at(4.0)
    assert not point.searched
    assert point.score == pytest.approx(60 + 3 * math.log(4), abs=0.6)
    assert point.configuration["learning_rate"] == pytest.approx(0.4, rel=0.6)
    assert 0 < point.deviation < 2
    assert surface.at(2.0).searched


def test_another_delta_and_release_model_need_other_noise(folder):
    """The ledger says that secure aggregation hides half of eps: the same claim then needs less noise."""
    _, (surface,) = read_surfaces(folder)
    assert surface.at(4.0, delta=1e-6).noise > surface.at(4.0).noise > surface.at(4.0, delta=1e-4).noise
    assert surface.at(1.5, release="secure-aggregation").noise < surface.at(1.5).noise


def test_the_smallest_eps_that_reaches_a_score(folder):
    _, (surface,) = read_surfaces(folder)
    reached = surface.reach(63)
    assert reached.epsilon == pytest.approx(math.e, rel=0.25)
    assert reached.score >= 63
    assert surface.reach(90) is None


def test_questions_without_an_answer(folder):
    _, (surface,) = read_surfaces(folder)
    with pytest.raises(UserError, match=r"epsilon = 100 needs a noise multiplier of .*; DP-FedGD was searched from"):
        surface.at(100.0)
    with pytest.raises(UserError, match="rounds = 50: DP-FedGD was searched with 6 rounds"):
        surface.at(4.0, rounds=50)


def test_predictions_of_the_finalists_are_compared_with_the_contest(folder):
    _, (surface,) = read_surfaces(folder)
    assert {finalist.epsilon for finalist in surface.finalists} == {1, 2, 8}
    assert max(abs(finalist.predicted - finalist.score) for finalist in surface.finalists) < 2


def test_the_command_prints_answers_and_draws(folder):
    run = CliRunner().invoke(app, ["frontier", str(folder), "--epsilon", "4", "--reach", "63", "--figure", "--json"])
    assert run.exit_code == 0, run.output
    answers = json.loads(run.output.splitlines()[-1])
    assert [answer["epsilon"] for answer in answers][1] == 4
    first = (folder / "figures" / "frontier.svg").read_bytes()
    assert CliRunner().invoke(app, ["frontier", str(folder), "--figure"]).exit_code == 0
    assert (folder / "figures" / "frontier.svg").read_bytes() == first


def test_tables_show_the_surface_its_uncertainty_and_its_errors(folder):
    with Ledger.read(folder) as ledger:
        results = Results.read(ledger)
    (setting,) = results.settings
    caption = selection(results, setting).caption
    assert "Surface of DP-FedGD: it expects a best validation score" in caption
    assert "finalists with a mean error of" in caption
    assert {1, 2, 8} < set(frontier(results, setting).data["epsilon"])


def test_a_prediction_can_be_checked_by_training(folder):
    _, (surface,) = read_surfaces(folder)
    found = confirmed(surface, surface.at(4.0), 2, None, None)
    assert found.seeds == 2
    assert 0 <= found.mean <= 100
