"""A search whose winner may be published: its price, what is drawn, who wins, and that nothing else is shown."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from private_study import SECRET, TEXT, study

from orchestrator.execution import merging, study_run
from orchestrator.execution.progress import View
from orchestrator.report.benchmark.export import write_export
from orchestrator.report.html import read as read_page
from orchestrator.report.tables import write_tables
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results
from orchestrator.search.history import History
from orchestrator.search.strategies.private import Private, fixed_grid, noisy_best, score_deviation
from orchestrator.study.cell_id import CellId
from orchestrator.study.cells import Blueprint
from trainables.errors import UserError
from trainables.privacy.gaussian import epsilon_of, mu_of
from trainables.privacy.private_selection import (
    RUNS,
    best_released,
    private_search,
    private_searches,
    score_std,
    with_score,
)

DELTA = 1e-5
CELL = "tiny / iid / DP-FedGD / eps 40"
CELL_ID = CellId("synthetic-frozen:400,100,6,3", "iid", study().methods[0].id, 40.0)


# ---- the price


def by_dp_accounting(searches, shape):
    accountant = RdpAccountant(orders=np.concatenate([np.geomspace(1.01, 1000, 400), [2000.0]]))
    for mu, mean in searches:
        event = dp_event.GaussianDpEvent(1 / mu)
        accountant.compose(dp_event.RepeatAndSelectDpEvent(event, mean=mean, shape=shape))
    return accountant.get_epsilon(DELTA)


@pytest.mark.parametrize("epsilon", [0.5, 10])
@pytest.mark.parametrize("mean", [2, 195])
def test_the_price_is_the_tighter_of_two_accounts(epsilon, mean):
    mu = mu_of(epsilon, DELTA)
    profile, renyi = best_released(mu, mean, DELTA), by_dp_accounting([(mu, mean)], shape=1)
    assert private_search(mu, mean, DELTA, "geometric") == pytest.approx(min(profile, renyi))
    assert 0.6 * renyi < profile < 1.05 * renyi  # two proofs; of few runs Renyi's says much too much


@pytest.mark.parametrize("mu", [1e-3, 0.27])
def test_the_logarithmic_number_is_priced_by_dp_accounting(mu):
    """Also where only the highest order comes near."""
    assert private_search(mu, 50, DELTA, "logarithmic") == by_dp_accounting([(mu, 50)], shape=0)


def test_several_searches_cost_more_than_one_and_less_than_their_sum():
    searches = [(mu_of(epsilon, DELTA), 50.0) for epsilon in (0.5, 1, 1)]
    together = private_searches(searches, DELTA, "geometric")
    assert together == by_dp_accounting(searches, shape=1)
    alone = [private_search(*search, DELTA, "geometric") for search in searches]
    assert max(alone) < together < sum(alone)
    assert alone[1] < private_searches(searches[1:], DELTA, "geometric") < together


def test_a_search_that_tells_nothing_costs_nothing():
    one = (mu_of(1, DELTA), 2.0)
    assert private_search(0.0, 10, DELTA, "geometric") == 0
    assert private_searches([(0.0, 10)], DELTA, "geometric") == private_searches([], DELTA, "geometric") == 0
    assert private_searches([(0.0, 10), one], DELTA, "geometric") == private_search(*one, DELTA, "geometric")


def test_without_noise_there_is_no_price_and_one_run_is_no_search():
    assert private_search(math.inf, 10, DELTA, "geometric") == math.inf
    assert private_searches([(math.inf, 10), (1, 10)], DELTA, "geometric") == math.inf
    assert private_search(1.0, 1, DELTA, "logarithmic") == epsilon_of(1.0, DELTA)


def test_a_score_costs_nothing_up_to_the_mu_of_its_run():
    """300 rows: one moves the share by 1/300, so std 1 / (300 mu part) makes it mu part."""
    mu = mu_of(1, DELTA)
    assert score_std(1, DELTA, 300, 0.5) == pytest.approx(1 / (300 * 0.5 * mu))
    assert with_score(1, 1, DELTA, 1) == pytest.approx(mu)
    assert with_score(1, 1, DELTA, 3) == pytest.approx(3 * mu)
    assert with_score(2, 1, DELTA, 1) == pytest.approx(mu_of(2, DELTA))  # a run that does not keep its claim
    assert with_score(1, math.inf, DELTA, 0) == math.inf  # nothing is claimed: a score that costs nothing mends nothing
    assert with_score(0.5, 0.25, DELTA, 1) == pytest.approx(mu_of(0.5, DELTA))
    assert with_score(0, 1, DELTA, 0.5) == pytest.approx(0.5 * mu)  # delta alone covers the run
    assert with_score(math.inf, 1, DELTA, 1) == with_score(1, math.inf, DELTA, 1) == math.inf
    assert score_std(math.inf, DELTA, 300, 0.5) == 0


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("mean", [1, 1.5, 40])
def test_the_number_of_runs_has_its_mean(runs, mean):
    """Of 5,000 draws the mean errs by a few percent: of a geometric number the deviation is about the mean, of a
    logarithmic one up to twice that."""
    drawn = np.array([RUNS[runs].draw(mean, seed) for seed in range(5_000)])
    assert drawn.min() == 1
    assert drawn.mean() == pytest.approx(mean, rel=0.1)
    if mean == 1:
        assert drawn.max() == 1


# ---- what is drawn, and who wins


def test_draws_follow_from_the_secret_and_never_share_noise():
    cell = Blueprint.draw(study(TEXT.replace("trials: 6", "trials: 300"))).cells[0]
    (variant,) = cell.study.variants

    def draws(secret: bytes):
        task = cell.study.search_task(cell.method, cell.epsilon, variant, 40, secret)
        _, configurations, seeds = Private().propose(task, History(task, variant.seeds, {}))
        return list(zip(configurations, seeds, strict=True))

    found = draws(b"a" * 32)
    assert found == draws(b"a" * 32)
    assert found != draws(b"b" * 32)
    many = [draw for secret in range(4) for draw in draws(bytes([secret]) * 32)]
    assert len({seed for _, seed in many}) == len(many) > 100
    assert {configuration["learning_rate"] for configuration, _ in many} == {0.01, 0.1, 1, 10, 0.5}
    assert len(fixed_grid(cell.space)) == 5  # 0.1 is in both grids and drawn no more often for it


def deviation(of, epsilon: float, rows: int) -> float:
    (variant,) = of.variants
    return score_deviation(of.search_task(of.methods[0], epsilon, variant, rows))


def test_the_noisy_score_decides():
    """Noise is that of the run's own seed: with none the best score wins, with much of it any."""
    outcomes = {"a": ("done", 50.0, 1.0), "b": ("done", 51.0, 1.0), "c": ("diverged", 99.0, None)}
    seeds = {"a": 1, "b": 2, "c": 3}
    assert noisy_best(seeds, outcomes, 0.0).key == "b"
    assert noisy_best(seeds, outcomes, 0.0).score == 51
    winners = [noisy_best({"a": 10 * n, "b": 10 * n + 1, "c": 10 * n + 2}, outcomes, 100.0).key for n in range(200)]
    assert 60 < winners.count("a") < 140
    assert set(winners) == {"a", "b"}
    assert noisy_best({"c": 3}, outcomes, 1.0) is None


def test_the_noise_of_a_score_has_the_deviation_that_is_priced():
    noise = deviation(study(), 40.0, 40)
    assert noise == pytest.approx(100 / (40 * mu_of(40, DELTA)))
    scores = [noisy_best({"a": seed}, {"a": ("done", 50.0, 1.0)}, noise).score for seed in range(4000)]
    assert np.std(scores) == pytest.approx(noise, rel=0.05)
    assert np.mean(scores) == pytest.approx(50, abs=0.1 * noise)


# ---- what is refused


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("strategies: [private]", "strategies: [private, grid]", "the others would show what private hides"),
        ("epsilons: [40]", "epsilons: [40]\nobjective: loss", "needs accuracy"),
        ("clip: 2", "clip: 2, level: user", "protects records"),
        ("trials: 6}", "trials: 6, private: {score: 0}}", "score"),
    ],
)
def test_what_would_not_be_private_is_refused(old, new, sentence):
    with pytest.raises(UserError, match=sentence):
        study(TEXT.replace(old, new))


def test_methods_without_a_known_price_are_refused():
    text = TEXT.replace(
        "dp-fedgd:\n      coarse: {learning_rate: [0.01, 0.1, 1, 10]}\n      fine: {learning_rate: [0.1, 0.5]}",
        "dp-fedadamw",
    ).replace("[40]", "[1]")  # which is quickly priced
    with pytest.raises(UserError, match="samples rows"):
        Blueprint.draw(study(text))


# ---- a whole study


def run(folder: Path, text: str = TEXT, secret: bytes = SECRET, **options) -> study_run.Finished:
    """With a known secret, for a number of runs that is not too small."""
    with Ledger.write(folder) as ledger:
        ledger.add_secrets({CELL_ID: secret})
    return study_run.run(study(text), text, folder, View(), backend="local", **options)


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("private")
    finished = run(folder)
    assert (finished.complete, finished.failed) == (True, 0)
    return folder


def published(folder: Path) -> dict[str, bytes]:
    files = [*sorted((folder / "tables").rglob("*")), folder / "best.yaml"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files if file.is_file()}


def test_the_winner_is_trained_once_and_judged_twice(swept):
    """Its confirm run has other rows to be judged on and the same noise: all that clients see is the same."""
    with Ledger.read(swept) as ledger:
        stages, outcomes = ledger.stages(), ledger.outcomes()
        searched = ledger.rows(stages[CELL_ID, "private", "private"])
        (confirmed,) = ledger.rows(stages[CELL_ID, "private", "confirm"]).values()
        winner = Results.read(ledger).cells[0].search.choice
    assert len(searched) > 2
    assert len({row.trial.seed for row in searched.values()}) == len(searched)
    chosen = searched[winner.key]
    assert confirmed.metrics["train_loss"] == chosen.metrics["train_loss"]
    assert confirmed.trial.problem.evaluate_on == "test"
    noisy = deviation(study(), 40.0, 40)
    assert winner.key == noisy_best({k: row.trial.seed for k, row in searched.items()}, outcomes, noisy).key


def test_nothing_but_the_winner_is_published(swept):
    """No score, no curve, no seed and no number of the others; nor what clients measured beside their releases."""
    with Ledger.read(swept) as ledger:
        rows = ledger.rows(ledger.outcomes())
        stages = ledger.stages()
        secret = ledger.secrets()[CELL_ID]
        runs = len(stages[CELL_ID, "private", "private"])
    shown = b"\n".join(published(swept).values()).decode() + json.dumps(read_page([str(swept)]))
    assert secret.hex() not in shown
    for row in rows.values():
        assert str(row.trial.seed) not in shown
        assert row.key not in shown
    for key in stages[CELL_ID, "private", "private"]:
        for value in rows[key].metrics["loss"].values():
            assert f"{value:.7g}" not in shown
    (confirmed,) = (rows[key] for key in stages[CELL_ID, "private", "confirm"])
    for name in ("train_loss", "clipped_share", "signal_norm", "noise_norm"):
        for value in confirmed.metrics[name].values():
            assert f"{value:.7g}" not in shown or value in (0.0, 100.0)
    assert f"{confirmed.metrics['loss'][6]:.7g}" in shown
    page = read_page([str(swept)])[0]
    assert page["cells"][0]["search"]["mean"] == []
    assert page["sessions"] == page["partitions"] == []
    assert page["status"]["trials_ended"] == 1 < runs
    with pytest.raises(UserError, match="private search"):
        write_export(swept, swept / "export")


def test_tables_say_the_price_and_that_they_may_be_published(swept):
    text = (swept / "tables" / "privacy.md").read_text()
    price = private_search(mu_of(40, DELTA), 6, DELTA, "geometric")
    assert "may be published" in text
    frame = (swept / "tables" / "privacy.csv").read_text().splitlines()
    line = dict(zip(frame[0].split(","), frame[1].split(","), strict=True))
    assert float(line["epsilon_with_search"]) == pytest.approx(price, rel=1e-6)
    assert "may be published" in (swept / "tables" / "README.md").read_text()
    entry = yaml.safe_load((swept / "best.yaml").read_text())["cells"][CELL]
    assert entry["seeds"] == []
    assert isinstance(entry["test_accuracy"], float)


@pytest.mark.ray
def test_an_interrupted_search_goes_on_with_the_same_runs(swept, tmp_path, local_ray):
    """Stopped on a real Ray before anything ran, and taken up again there."""
    begun = tmp_path / "begun"
    run(begun, stop_after_s=0)
    assert run(begun).complete
    assert published(begun) == published(swept)


def test_a_search_that_lost_half_of_its_runs_draws_the_same_ones(swept, tmp_path):
    halved = Path(shutil.copytree(swept, tmp_path / "halved"))
    with Ledger.write(halved) as ledger:
        keys = list(ledger.outcomes())
        ledger._db.executemany("DELETE FROM trials WHERE key = ?", ((key,) for key in keys[::2]))
    study_run.run(study(), TEXT, halved, View(), backend="local")
    assert published(halved) == published(swept)


def test_secrets_are_drawn_anew_for_every_folder_and_cell_and_travel_with_the_runs(swept, tmp_path):
    found = []
    for name in ("one", "two"):
        with Ledger.write(tmp_path / name) as ledger:
            a, b = CELL_ID._replace(epsilon=1), CELL_ID._replace(epsilon=2)
            found += [ledger.secret(a), ledger.secret(b)]
            assert ledger.secret(a) == found[-2]
    assert len(set(found)) == 4
    merging.merge([swept], tmp_path / "merged")
    with Ledger.read(tmp_path / "merged") as ledger:
        assert ledger.secrets() == {CELL_ID: SECRET}
    assert published(tmp_path / "merged") == published(swept)


def test_an_unfinished_search_shows_nothing(swept, tmp_path):
    """Not even how many runs have ended."""
    folder = Path(shutil.copytree(swept, tmp_path / "unfinished"))
    with Ledger.write(folder) as ledger:
        lost = ledger.stages()[CELL_ID, "private", "private"][0]
        ledger._db.execute("DELETE FROM trials WHERE key = ?", (lost,))
        ledger._db.execute("DELETE FROM stages WHERE stage = 'confirm'")
        write_tables(ledger, folder)
    text = (folder / "tables" / "README.md").read_text()
    assert "0 of 1 winners are known" in text
    assert "at least 1 trial is missing" in text
    assert "learning_rate" not in (folder / "tables" / "hyperparameters.md").read_text()


def test_a_folder_is_audited_in_one_run(swept, fedsweep, capfd):
    """With a claim of 40 no number of guesses about 600 weights can show more: it says so."""
    code, out, _ = fedsweep("audit", swept, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["epsilon"]["claimed"] == 40
    assert found["epsilon"]["at_least"] <= found["power"]["epsilon"] < 40
    code, out, _ = fedsweep("audit", swept)
    assert code == 0
    assert "power      none" in out
