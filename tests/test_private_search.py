"""Private search: its privacy cost, its draws, its selection, and that only the winner is published."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from handmade_rows import HAS_KEY
from private_study import CELL, CELL_ID, SECRET, TEXT, published, run, study

from orchestrator.execution import merging, study_run
from orchestrator.execution.progress import View
from orchestrator.report.benchmark.export import write_export
from orchestrator.report.html import read as read_page
from orchestrator.report.tables import write_tables
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results
from orchestrator.search.history import History
from orchestrator.search.objective import ACCURACY
from orchestrator.search.strategies.private import Private, fixed_grid, noisy_best, score_deviation
from orchestrator.study.cells import PreparedStudy
from trainables.errors import UserError
from trainables.privacy.gaussian import epsilon_of, mu_of
from trainables.privacy.private_selection import (
    RUNS,
    Search,
    best_released,
    private_search,
    private_searches,
    score_std,
    with_score,
)

DELTA = 1e-5


# ---- privacy cost


def by_dp_accounting(searches, shape):
    accountant = RdpAccountant(orders=np.concatenate([np.geomspace(1.01, 1000, 400), [2000.0]]))
    for mu, mean in searches:
        event = dp_event.GaussianDpEvent(1 / mu)
        accountant.compose(dp_event.RepeatAndSelectDpEvent(event, mean=mean, shape=shape))
    return accountant.get_epsilon(DELTA)


@pytest.mark.parametrize("epsilon", [0.5, 10])
@pytest.mark.parametrize("mean", [2, 195])
def test_the_cost_is_the_tighter_of_two_bounds(epsilon, mean):
    mu = mu_of(epsilon, DELTA)
    profile, renyi = best_released(mu, mean, DELTA), by_dp_accounting([(mu, mean)], shape=1)
    assert private_search(mu, mean, DELTA, "geometric") == pytest.approx(min(profile, renyi))
    assert 0.6 * renyi < profile < 1.05 * renyi  # two proofs; the Renyi bound is loose for few runs


@pytest.mark.parametrize("mu", [1e-3, 0.27])
def test_the_cost_of_logarithmic_runs_matches_dp_accounting(mu):
    """Also where only the highest Renyi order is close to tight."""
    assert private_search(mu, 50, DELTA, "logarithmic") == by_dp_accounting([(mu, 50)], shape=0)


def test_several_searches_cost_more_than_one_and_less_than_their_sum():
    searches = [Search(mu_of(epsilon, DELTA), 50.0) for epsilon in (0.5, 1, 1)]
    together = private_searches(searches, DELTA)
    assert together == by_dp_accounting([search[:2] for search in searches], shape=1)
    alone = [private_search(*search[:2], DELTA, "geometric") for search in searches]
    assert max(alone) < together < sum(alone)
    assert alone[1] < private_searches(searches[1:], DELTA) < together


def test_a_search_with_mu_zero_costs_nothing():
    one = (mu_of(1, DELTA), 2.0)
    assert private_search(0.0, 10, DELTA, "geometric") == 0
    assert private_searches([Search(0.0, 10)], DELTA) == private_searches([], DELTA) == 0
    assert private_searches([Search(0.0, 10), Search(*one)], DELTA) == private_search(*one, DELTA, "geometric")


def test_cost_without_noise_and_cost_of_a_single_run():
    assert private_search(math.inf, 10, DELTA, "geometric") == math.inf
    assert private_searches([Search(math.inf, 10), Search(1, 10)], DELTA) == math.inf
    assert private_search(1.0, 1, DELTA, "logarithmic") == epsilon_of(1.0, DELTA)


def test_a_score_is_free_up_to_the_mu_of_its_run():
    """One of 300 rows changes the accuracy by 1/300, so a std of 1 / (300 mu part) has privacy mu part."""
    mu = mu_of(1, DELTA)
    assert score_std(1, DELTA, 300, 0.5) == pytest.approx(1 / (300 * 0.5 * mu))
    assert with_score(1, 1, DELTA, 1) == pytest.approx(mu)
    assert with_score(1, 1, DELTA, 3) == pytest.approx(3 * mu)
    assert with_score(2, 1, DELTA, 1) == pytest.approx(mu_of(2, DELTA))  # a run that exceeds its claimed eps
    assert with_score(1, math.inf, DELTA, 0) == math.inf  # no claimed eps: a free score does not help
    assert with_score(0.5, 0.25, DELTA, 1) == pytest.approx(mu_of(0.5, DELTA))
    assert with_score(0, 1, DELTA, 0.5) == pytest.approx(0.5 * mu)  # delta alone covers the run
    assert with_score(math.inf, 1, DELTA, 1) == with_score(1, math.inf, DELTA, 1) == math.inf
    assert score_std(math.inf, DELTA, 300, 0.5) == 0


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("mean", [1, 1.5, 40])
def test_the_number_of_runs_has_the_configured_mean(runs, mean):
    """The mean of 5,000 draws is accurate to a few percent: the standard deviation of a geometric number is about its
    mean, that of a logarithmic one up to twice as large."""
    drawn = np.array([RUNS[runs].draw(mean, seed) for seed in range(5_000)])
    assert drawn.min() == 1
    assert drawn.mean() == pytest.approx(mean, rel=0.1)
    if mean == 1:
        assert drawn.max() == 1


# ---- draws and selection


def test_draws_follow_from_the_secret_and_never_share_noise():
    cell = PreparedStudy.prepare(study(TEXT.replace("trials: 6", "trials: 300"))).cells[0]
    (variant,) = cell.study.variants

    def draws(secret: bytes):
        task = cell.study.search_task(cell.method, cell.epsilon, variant, 40, secret)
        _, configurations, seeds = Private().propose(task, History(task, variant.seeds, {}))
        return list(zip(configurations, seeds, strict=True))

    first_draws = draws(b"a" * 32)
    assert first_draws == draws(b"a" * 32)
    assert first_draws != draws(b"b" * 32)
    all_draws = [draw for secret in range(4) for draw in draws(bytes([secret]) * 32)]
    assert len({seed for _, seed in all_draws}) == len(all_draws) > 100
    assert {configuration["learning_rate"] for configuration, _ in all_draws} == {0.01, 0.1, 1, 10, 0.5}
    assert len(fixed_grid(cell.space)) == 5  # 0.1 is in both grids but counts once


def deviation(of, epsilon: float, rows: int) -> float:
    (variant,) = of.variants
    return score_deviation(of.search_task(of.methods[0], epsilon, variant, rows))


def test_the_noisy_score_decides_the_winner():
    """Each run's seed determines its noise. Without noise the best score wins; with much noise any run can."""
    outcomes = {"a": ("done", 50.0, 1.0), "b": ("done", 51.0, 1.0), "c": ("diverged", 99.0, None)}
    seeds = {"a": 1, "b": 2, "c": 3}
    assert noisy_best(seeds, outcomes, 0.0).key == "b"
    assert noisy_best(seeds, outcomes, 0.0).score == 51
    winners = [noisy_best({"a": 10 * n, "b": 10 * n + 1, "c": 10 * n + 2}, outcomes, 100.0).key for n in range(200)]
    assert 60 < winners.count("a") < 140
    assert set(winners) == {"a", "b"}
    assert noisy_best(seeds, outcomes, 0.0, objective=replace(ACCURACY, lower_is_better=True)).key == "a"
    assert noisy_best({"c": 3}, outcomes, 1.0) is None


def test_score_noise_has_the_accounted_deviation():
    expected_std = deviation(study(), 40.0, 40)
    assert expected_std == pytest.approx(100 / (40 * mu_of(40, DELTA)))
    scores = [noisy_best({"a": seed}, {"a": ("done", 50.0, 1.0)}, expected_std).score for seed in range(4000)]
    assert np.std(scores) == pytest.approx(expected_std, rel=0.05)
    assert np.mean(scores) == pytest.approx(50, abs=0.1 * expected_std)


# ---- refused studies


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("strategies: [private]", "strategies: [private, grid]", "the others would show what private hides"),
        ("epsilons: [40]", "epsilons: [40]\nobjective: loss", "metric loss: the influence of one row"),
        ("clip: 2", "clip: 2, level: user", "protects records"),
        ("trials: 6}", "trials: 6, private: {score: 0}}", "score"),
    ],
)
def test_settings_that_break_privacy_are_refused(old, new, sentence):
    with pytest.raises(UserError, match=sentence):
        study(TEXT.replace(old, new))


def test_methods_without_a_known_cost_are_refused():
    text = TEXT.replace(
        "dp-fedgd:\n      coarse: {learning_rate: [0.01, 0.1, 1, 10]}\n      fine: {learning_rate: [0.1, 0.5]}",
        "dp-fedadamw",
    ).replace("[40]", "[1]")  # fast to account for
    with pytest.raises(UserError, match="samples rows"):
        PreparedStudy.prepare(study(text))


# ---- complete studies


@pytest.fixture(scope="module")
def finished_study(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("private")
    finished = run(folder)
    assert (finished.complete, finished.failed) == (True, 0)
    return folder


def test_the_winner_has_the_same_training_in_search_and_confirm(finished_study):
    """The confirm run is evaluated on other rows with the same noise, so the clients' view is identical."""
    with Ledger.read(finished_study) as ledger:
        stages, outcomes = ledger.stages(), ledger.outcomes()
        searched = ledger.rows(stages[CELL_ID, "private", "private"])
        (confirmed,) = ledger.rows(stages[CELL_ID, "private", "confirm"]).values()
        winner = Results.read(ledger).cells[0].search.choice
    assert len(searched) > 2
    assert len({row.trial.seed for row in searched.values()}) == len(searched)
    chosen = searched[winner.key]
    assert confirmed.metrics["train_loss"] == chosen.metrics["train_loss"]
    assert confirmed.trial.problem.evaluate_on == "test"
    score_noise = deviation(study(), 40.0, 40)
    assert (
        winner.key == noisy_best({k: row.trial.seed for k, row in searched.items()}, outcomes, score_noise, SECRET).key
    )


def test_only_the_winner_is_published(finished_study):
    """No score, curve, seed or count of the other runs is published, nor any client metric outside the releases."""
    with Ledger.read(finished_study) as ledger:
        rows = ledger.rows(ledger.outcomes())
        stages = ledger.stages()
        secret = ledger.secrets()[CELL_ID]
        runs = len(stages[CELL_ID, "private", "private"])
    public_text = b"\n".join(published(finished_study).values()).decode() + json.dumps(read_page([str(finished_study)]))
    assert secret.hex() not in public_text
    for row in rows.values():
        assert str(row.trial.seed) not in public_text
        assert row.key not in public_text
    for key in stages[CELL_ID, "private", "private"]:
        for value in rows[key].metrics["loss"].values():
            assert f"{value:.7g}" not in public_text
    (confirmed,) = (rows[key] for key in stages[CELL_ID, "private", "confirm"])
    for name in ("train_loss", "clipped_share", "signal_norm", "noise_norm"):
        for value in confirmed.metrics[name].values():
            assert f"{value:.7g}" not in public_text or value in (0.0, 100.0)
    assert f"{confirmed.metrics['loss'][6]:.7g}" in public_text
    page = read_page([str(finished_study)])[0]
    assert page["cells"][0]["search"]["mean"] == []
    assert page["sessions"] == page["partitions"] == []
    assert page["status"]["trials_ended"] == 1 < runs
    with pytest.raises(UserError, match="private search"):
        write_export(finished_study, finished_study / "export")


def test_tables_state_the_privacy_cost_and_that_they_may_be_published(finished_study):
    text = (finished_study / "tables" / "privacy.md").read_text()
    cost = private_search(mu_of(40, DELTA), 6, DELTA, "geometric")
    assert "may be published" in text
    frame = (finished_study / "tables" / "privacy.csv").read_text().splitlines()
    line = dict(zip(frame[0].split(","), frame[1].split(","), strict=True))
    assert float(line["epsilon_with_search"]) == pytest.approx(cost, rel=1e-6)
    assert "may be published" in (finished_study / "tables" / "README.md").read_text()
    entry = yaml.safe_load((finished_study / "best.yaml").read_text())["cells"][CELL]
    assert entry["seeds"] == []
    assert isinstance(entry["test_accuracy"], float)


@pytest.mark.ray
def test_an_interrupted_search_resumes_with_the_same_runs(finished_study, tmp_path, local_ray):
    """Interrupted on Ray before any trial ran, then resumed there."""
    interrupted = tmp_path / "interrupted"
    run(interrupted, stop_after_s=0)
    assert run(interrupted).complete
    assert published(interrupted) == published(finished_study)


def test_a_search_that_lost_half_of_its_runs_draws_them_again(finished_study, tmp_path):
    halved = Path(shutil.copytree(finished_study, tmp_path / "halved"))
    with Ledger.write(halved) as ledger:
        keys = list(ledger.outcomes())
        ledger._db.executemany(f"DELETE FROM trials WHERE {HAS_KEY}", ((key,) for key in keys[::2]))
    study_run.run(study(), TEXT, halved, View(), backend="local")
    assert published(halved) == published(finished_study)


def test_every_folder_and_cell_has_its_own_secret_and_merging_keeps_it(finished_study, tmp_path):
    secrets = []
    for name in ("one", "two"):
        with Ledger.write(tmp_path / name) as ledger:
            a, b = CELL_ID._replace(epsilon=1), CELL_ID._replace(epsilon=2)
            secrets += [ledger.secret(a, "").value, ledger.secret(b, "").value]
            assert ledger.secret(a, "").value == secrets[-2]
    assert len(set(secrets)) == 4
    merging.merge([finished_study], tmp_path / "merged")
    with Ledger.read(tmp_path / "merged") as ledger:
        assert ledger.secrets() == {CELL_ID: SECRET}
    assert published(tmp_path / "merged") == published(finished_study)


def test_a_foreign_secret_does_not_replace_ones_own(finished_study, tmp_path):
    """Anyone who knows the secret of a search can subtract its noise."""
    other = Path(shutil.copytree(finished_study, tmp_path / "other"))
    with Ledger.write(other) as ledger:
        ledger._db.execute("UPDATE secrets SET secret = ?", (b"known to a stranger".ljust(32),))
    for parts in ([other, finished_study], [finished_study, other]):
        with pytest.raises(UserError, match="another private search"):
            merging.merge(parts, tmp_path / f"of {parts[0].name}")


def test_an_unfinished_search_publishes_nothing(finished_study, tmp_path):
    """Not even the number of runs that have ended."""
    folder = Path(shutil.copytree(finished_study, tmp_path / "unfinished"))
    with Ledger.write(folder) as ledger:
        deleted = ledger.stages()[CELL_ID, "private", "private"][0]
        ledger._db.execute(f"DELETE FROM trials WHERE {HAS_KEY}", (deleted,))
        ledger._db.execute("DELETE FROM stages WHERE stage = 'confirm'")
        ledger.correct_counts()
        write_tables(ledger, folder)
    text = (folder / "tables" / "README.md").read_text()
    assert "0 of 1 winners are known" in text
    assert "at least 1 trial is missing" in text
    assert "learning_rate" not in (folder / "tables" / "hyperparameters.md").read_text()


def test_a_folder_is_audited_in_one_run(finished_study, fedsweep):
    """An honest winner keeps its claim of 40. A tenth of the noise does not, and the power promises to see it."""
    code, out, _ = fedsweep("audit", finished_study, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["epsilon"]["claimed"] == 40
    assert 0 < report["epsilon"]["at_least"] < 40
    assert 0.1 < report["power"]["noise"] < 1
    code, out, _ = fedsweep("audit", finished_study, "--noise-factor", "0.1")
    assert code == 1
    assert "FAILED" in out
