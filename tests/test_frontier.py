"""`fedsweep frontier`: predictions at any budget, from the ledger of a surface search."""

import json
import math
from dataclasses import replace

import pytest
import surface_results
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.execution.frontier import confirmed, read_surfaces
from orchestrator.report.html.surface_data import surface_data
from orchestrator.report.tables.frontier import frontier
from orchestrator.report.tables.selection_table import selection
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results
from orchestrator.study.study import Study
from trainables.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    results = tmp_path_factory.mktemp("frontier")
    surface_results.write(results)
    return results


@pytest.fixture(scope="module")
def surface(folder):
    """Fitted once for all tests."""
    _, (surface,) = read_surfaces(folder)
    return surface


def test_a_budget_that_was_not_searched(surface):
    point = surface.at(4.0)
    assert not point.searched
    rate = point.configuration["learning_rate"]
    assert 0.2 / 1.4 <= rate <= 0.4 * 1.4, "one that is good at the larger noise, too"
    assert point.score == pytest.approx(surface_results.accuracy(4.0, rate), abs=0.6)
    assert 0 < point.deviation < 2
    assert surface.at(2.0).searched


def test_another_delta_and_release_model_need_other_noise(surface):
    """The ledger says that secure aggregation hides half of eps: the same claim then needs less noise."""
    assert surface.at(4.0, delta=1e-6).noise > surface.at(4.0).noise > surface.at(4.0, delta=1e-4).noise
    assert surface.at(1.5, release="secure-aggregation").noise < surface.at(1.5).noise


def test_the_smallest_eps_that_reaches_a_score(surface):
    reached = surface.reach(63)
    assert reached.epsilon == pytest.approx(math.e, rel=0.15)
    assert reached.score >= 63
    assert surface.reach(90) is None


def test_questions_without_an_answer(surface):
    with pytest.raises(UserError, match=r"epsilon = 100 needs a noise multiplier of .*; DP-FedGD was searched from"):
        surface.at(100.0)
    with pytest.raises(UserError, match=r"epsilon = 9 needs .*; DP-FedGD was searched from .* \(eps 8 to 1\)"):
        surface.at(9.0)  # a trial of the search has fewer rounds and less noise, but a confirm run has not
    with pytest.raises(UserError, match="rounds = 50: DP-FedGD was searched with 6 rounds"):
        surface.at(4.0, rounds=50)
    without_noise = replace(surface, results=())
    with pytest.raises(UserError, match="release = 'secure-aggregation': the study has no finite epsilon"):
        without_noise.at(4.0, release="secure-aggregation")


@pytest.mark.parametrize("more", [[], ["--reach", "63"], ["--epsilon", "4"], ["--figure"]])
def test_other_rounds_are_refused_whatever_is_predicted(folder, more):
    run = CliRunner().invoke(app, ["frontier", str(folder), "--rounds", "50", *more])
    assert "rounds = 50: DP-FedGD was searched with 6 rounds" in str(run.exception)


def test_the_searched_rounds_change_no_prediction(surface):
    assert surface.curve(rounds=6) == surface.curve()
    assert surface.reach(63, rounds=6) == surface.reach(63)


def test_predictions_of_the_finalists_are_compared_with_the_contest(surface):
    assert {finalist.epsilon for finalist in surface.finalists} == {1, 2, 8}
    assert max(abs(finalist.predicted - finalist.score) for finalist in surface.finalists) < 1


def test_the_command_prints_answers_and_draws(folder):
    run = CliRunner().invoke(app, ["frontier", str(folder), "--epsilon", "4", "--reach", "63", "--figure", "--json"])
    assert run.exit_code == 0, run.output
    answers = json.loads(run.output.splitlines()[-1])
    assert [answer["epsilon"] for answer in answers][1] == 4
    first = (folder / "figures" / "frontier.svg").read_bytes()
    assert CliRunner().invoke(app, ["frontier", str(folder), "--figure"]).exit_code == 0
    assert (folder / "figures" / "frontier.svg").read_bytes() == first
    assert b"mathdefault" not in first, "numbers of a logarithmic axis are plain"


def test_a_score_that_the_smallest_budget_reaches(folder):
    run = CliRunner().invoke(app, ["frontier", str(folder), "--reach", "10"])
    assert "reaches 10; smaller budgets were not searched" in run.output


def test_a_score_that_no_budget_reaches_is_an_error(folder):
    run = CliRunner().invoke(app, ["frontier", str(folder), "--reach", "90"])
    assert "reach = 90: no finite eps from 1 to 8 is predicted to reach 90 for DP-FedGD" in str(run.exception)


def test_tables_show_the_surface_its_uncertainty_and_its_errors(folder):
    with Ledger.read(folder) as ledger:
        results = Results.read(ledger)
        again = Results.read(ledger, results)
    assert again.surfaces[0] is results.surfaces[0], "not fitted again"
    (setting,) = results.settings
    caption = selection(results, setting).caption
    assert "Surface of DP-FedGD: it expects a best validation score" in caption
    assert "finalists with a mean error of" in caption
    assert {1, 2, 8} < set(frontier(results, setting).data["epsilon"])
    shown = surface_data(results.surfaces[0])
    assert [point["epsilon"] for point in shown["points"] if point["searched"]] == [1, 2, 8]
    assert {finalist["epsilon"] for finalist in shown["finalists"]} == {1, 2, 8}


def test_a_prediction_can_be_checked_by_training(surface):
    methods = [surface.method.model_dump(), {"name": "dp-fedadam"}]
    content = surface.study.model_dump() | {"methods": methods, "compare_to": "dp-fedadam"}
    two_methods = replace(surface, study=Study.model_validate(content))
    for each in (surface, two_methods):
        found = confirmed(each, surface.at(4.0), 2, None, None)
        assert found.seeds == 2
    assert 0 <= found.mean <= 100


def test_a_part_of_a_methods_name_is_enough(folder):
    run = CliRunner().invoke(app, ["frontier", str(folder), "--method", "fedgd", "--epsilon", "4", "--json"])
    assert run.exit_code == 0
    assert "DP-FedGD" in run.output


def test_a_share_instead_of_percent_is_an_error(folder):
    run = CliRunner().invoke(app, ["frontier", str(folder), "--reach", "0.63"])
    assert "reach = 0.63: scores are in percent, so a share of 0.63 is 63" in str(run.exception)


def test_another_release_model_has_its_own_range_of_budgets(surface):
    """The study claims eps under local release; under secure aggregation the same noise has a smaller eps."""
    own, other = surface.budgets(), surface.budgets(release="secure-aggregation")
    assert len(own) == len(other)
    assert all(b < a for a, b in zip(own, other, strict=True))
    assert surface.at(other[-1], release="secure-aggregation").noise == pytest.approx(surface.at(own[-1]).noise)
    curve = surface.curve(release="secure-aggregation")
    assert (curve[0].epsilon, curve[-1].epsilon) == pytest.approx((other[0], other[-1]), rel=0.01)
    with pytest.raises(UserError, match=rf"\(eps {other[-1]:.3g} to {other[0]:.3g}\)"):
        surface.at(own[-1] * 3, release="secure-aggregation")


def test_how_sure_it_is_that_a_budget_reaches_a_score(surface):
    perhaps, surely = surface.reach_of_band(63)
    assert perhaps <= surface.reach(63).epsilon * 1.01
    assert surely is None or surely >= surface.reach(63).epsilon * 0.99
    assert surface.reach_of_band(99.9) == (None, None)
