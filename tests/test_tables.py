"""Tables of ledgers written by hand, with numbers that are easy to verify."""

import csv
import hashlib
import io
import math
import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from handmade_ledgers import (
    GRID,
    HIGH,
    LAST,
    LOW,
    SETTING,
    build,
    caption,
    cell_id,
    frame,
    lines,
    row,
    study,
    write_finished,
    writing,
)
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from scipy import stats

from orchestrator.execution import training
from orchestrator.report.tables import Results, render
from orchestrator.report.tables.accuracy import printed_rounds
from orchestrator.report.tables.differences import holm
from orchestrator.report.tables.mcnemar import Comparison
from orchestrator.report.tables.partitions import split
from orchestrator.report.tables.render import rounded_up
from orchestrator.report.tables.tuning import shown_value
from orchestrator.results import frames, status
from orchestrator.results.best_file import read_best
from orchestrator.results.ledger import Ledger
from orchestrator.study.study import Study
from trainables import methods
from trainables.data import partition
from trainables.errors import UserError
from trainables.federation.trial_spec import DataSpec, ProblemSpec, TrialSpec
from trainables.privacy.gaussian import epsilon_of, mu_of
from trainables.privacy.plan import PrivacySettings


@pytest.fixture
def finished(tmp_path):
    write_finished(tmp_path)
    build(tmp_path)
    return tmp_path


# ---- what the account says beside eps


def test_trade_off_curves_are_written(finished):
    """At a false positive rate of 1/2, Phi^-1(1/2) = 0: the false negative rate is Phi(-mu)."""
    found = frame(finished, "trade-off")
    half = found[(found["false_positives"] == 0.5) & (found["epsilon"] == 1) & (found["method"] == "DP-FedGD")]
    assert half["mu"].item() == pytest.approx(mu_of(1, 1e-5))
    assert half["false_negatives"].item() == pytest.approx(stats.norm.cdf(-mu_of(1, 1e-5)))
    assert len(found.groupby(["method", "epsilon"])) == 4


def test_a_large_delta_is_noted(tmp_path):
    write_finished(tmp_path, protected=200_000)
    build(tmp_path)
    assert "Delta = 1e-05 is above 1/N = 5e-06, with 200000 records" in caption(tmp_path, "privacy")


# ---- accuracy


def test_accuracy_is_mean_and_sample_deviation_with_the_best_in_bold(finished):
    """Two seeds a, b: mean (a+b)/2 and deviation |a-b|/sqrt(2). 20, 24: 22 and 2.83; 40, 43: 41.5 and 2.12."""
    assert lines(finished, "accuracy") == [
        ["Method", "10", "20"],
        ["**ε = 1**", "", ""],
        ["DP-FedGD", "22.00 ± 2.83", "**41.50 ± 2.12**"],  # 10 and 8 behind: t = 9 of one degree of freedom, p = 0.07
        ["DP-FedAdam", "**40.00 ± 1.41**", "**50.50 ± 0.71**"],  # 19 and 17 ahead: t = 18, p = 0.035
        ["**ε = 8**", "", ""],
        ["DP-FedGD", "22.00 ± 2.83", "**41.50 ± 2.12**"],
        ["DP-FedAdam", "**40.00 ± 1.41**", "**50.50 ± 0.71**"],
    ]
    assert "sample standard deviation (ddof = 1) over 2 seeds (42, 7)" in caption(finished, "accuracy")
    assert "unfinished" not in caption(finished, "accuracy")
    first = frame(finished, "accuracy").iloc[0]
    assert (first["setting"], first["epsilon"], first["method"], first["round"]) == (SETTING, 1, "DP-FedGD", 10)
    assert (first["mean"], first["seeds"]) == (22.0, 2)
    assert first["std"] == pytest.approx(4 / math.sqrt(2))


def test_a_single_seed_has_no_deviation(tmp_path):
    with writing(tmp_path, study(seeds={"confirm": [42]}, epsilons=[1])) as writer:
        writer.search("dp-fedgd", 1, GRID)
        writer.confirm("dp-fedgd", 1, {}, {42: {10: 20.0, 20: 40.0}})
        writer.search("dp-fedadam", 1, GRID)
        writer.confirm("dp-fedadam", 1, {}, {42: {10: 20.001, 20: 39.0}})
    build(tmp_path)
    assert lines(tmp_path, "accuracy")[2:] == [
        ["DP-FedGD", "**20.00**", "**40.00**"],
        ["DP-FedAdam", "**20.00**", "39.00"],  # what prints the same is as good
    ]
    assert "a single seed (42)" in caption(tmp_path, "accuracy")


def test_many_evaluations_are_thinned_in_print_but_not_in_csv(tmp_path):
    every_round = {t: float(t) for t in range(1, LAST + 1)}
    of = study(evaluate_every=1, epsilons=[1], methods=["dp-fedgd"])
    with writing(tmp_path, of) as writer:
        writer.search("dp-fedgd", 1, GRID)
        writer.confirm("dp-fedgd", 1, {}, {42: every_round, 7: every_round})
    build(tmp_path)
    assert lines(tmp_path, "accuracy")[0] == ["Method", *(str(t) for t in range(2, LAST + 1, 2))]
    assert "the CSV file has all of them" in caption(tmp_path, "accuracy")
    assert len(frame(tmp_path, "accuracy")) == LAST


def test_a_mean_without_a_diverged_seed_is_marked_and_not_bold(tmp_path):
    """Seed 7 of DP-FedAdam diverges at round 20, so its 90 there does not count."""
    with writing(tmp_path, study(epsilons=[1])) as writer:
        writer.search("dp-fedgd", 1, GRID)
        writer.confirm("dp-fedgd", 1, {}, LOW)
        writer.search("dp-fedadam", 1, GRID)
        writer.confirm("dp-fedadam", 1, {}, {42: HIGH[42], 7: ("diverged", 20, {10: 41.0, 20: 90.0})})
    build(tmp_path)
    assert lines(tmp_path, "accuracy")[2:] == [
        ["DP-FedGD", "22.00 ± 2.83", "41.50 ± 2.12"],
        ["DP-FedAdam", "**40.00 ± 1.41**", "50.00 †"],
    ]
    assert "DP-FedAdam at ε = 1: seed 7 diverged" in caption(tmp_path, "accuracy")
    assert "(1 diverged)" in (tmp_path / "tables" / "README.md").read_text()
    best = yaml.safe_load((tmp_path / "best.yaml").read_text())["cells"][f"{SETTING} / DP-FedAdam / eps 1"]
    assert best["test_accuracy"] == {42: 50.0, 7: None}


# ---- an unfinished study


def test_an_unfinished_study_shows_its_results_and_what_is_missing(tmp_path):
    """DP-FedGD at 1: one seed of two is missing. DP-FedAdam at 1: one fine trial, then two confirm trials.
    At 8: coarse has one trial left each, then two confirm trials, and fine is not open yet: 1 + 3 + 2 * 3, and the
    fine grids. `status` expects the same number."""
    with writing(tmp_path, study()) as writer:
        writer.search("dp-fedgd", 1, GRID)
        writer.confirm("dp-fedgd", 1, {}, {42: LOW[42], 7: None})
        writer.search("dp-fedadam", 1, {**GRID, "fine": [({"learning_rate": 0.3}, None)]})
        for method in ("dp-fedgd", "dp-fedadam"):
            writer.search(method, 8, {"coarse": [({"learning_rate": 0.1}, 10.0), ({"learning_rate": 0.2}, None)]})
    build(tmp_path)
    assert lines(tmp_path, "accuracy") == [
        ["Method", "10", "20"],
        ["**ε = 1**", "", ""],
        ["DP-FedGD", "20.00 †", "40.00 †"],
        ["DP-FedAdam", "–", "–"],
        ["**ε = 8**", "", ""],
        ["DP-FedGD", "–", "–"],
        ["DP-FedAdam", "–", "–"],
    ]
    for text in (caption(tmp_path, "accuracy"), (tmp_path / "tables" / "README.md").read_text()):
        known = status.read(tmp_path)
        missing = known["trials_expected"] - known["trials_ended"]
        assert missing > 10
        assert f"The study is unfinished: about {missing} trials are missing." in text
    assert "seed 7 is not finished" in caption(tmp_path, "accuracy")
    trials = [line[5] for line in lines(tmp_path, "hyperparameters") if line[1]]
    assert trials == ["Trials", "3", "2 of 3", "1 of 2", "1 of 2"]
    assert [line[3] for line in lines(tmp_path, "mcnemar") if line[1]] == ["n01", "–", "–"]
    assert list(yaml.safe_load((tmp_path / "best.yaml").read_text())["cells"]) == [f"{SETTING} / DP-FedGD / eps 1"]


def test_a_study_without_results_has_empty_tables(tmp_path):
    with writing(tmp_path, study(), facts=False) as writer:
        for epsilon in (1, 8):
            for method in ("dp-fedgd", "dp-fedadam"):
                writer.search(method, epsilon, {"coarse": [({"learning_rate": 0.1}, None)]})
    build(tmp_path)
    assert {cell for line in lines(tmp_path, "accuracy") for cell in line[1:]} == {"10", "20", "", "–"}
    assert yaml.safe_load((tmp_path / "best.yaml").read_text()) == {"cells": {}}


def test_a_ledger_without_stages_has_an_index(tmp_path):
    with writing(tmp_path, study(), facts=False):
        pass
    build(tmp_path)
    assert "Nothing has been started yet." in (tmp_path / "tables" / "README.md").read_text()


def test_a_ledger_without_a_study_is_refused(tmp_path):
    with Ledger.write(tmp_path):
        pass
    with pytest.raises(UserError, match="no study yet"):
        build(tmp_path)


def test_a_cell_without_a_finished_trial_is_finished_and_named(tmp_path):
    with writing(tmp_path, study(methods=["dp-fedgd"], epsilons=[1])) as writer:
        writer.search(
            "dp-fedgd", 1, {"coarse": [({"learning_rate": 1.0}, "diverged"), ({"learning_rate": 5.0}, "failed")]}
        )
    build(tmp_path)
    assert lines(tmp_path, "accuracy")[-1] == ["DP-FedGD", "–", "–"]
    assert "Every search trial diverged or failed: DP-FedGD at ε = 1." in caption(tmp_path, "accuracy")
    assert "unfinished" not in caption(tmp_path, "accuracy")
    assert lines(tmp_path, "hyperparameters")[-1] == ["DP-FedGD", "–", "–", "–", "–", "2", "1 / 1", "–"]
    assert not (tmp_path / "tables" / "mcnemar.md").exists()  # one method: nothing to compare


# ---- hyperparameters


def test_hyperparameters_show_the_winner_its_stage_its_edges_and_lost_trials(tmp_path):
    """100 validation rows at 50%: a standard error is 100 * sqrt(.5 * .5 / 100) = 5, so 45 is near, 44.9 is not."""
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedgd"])) as writer:
        coarse = [
            ({"learning_rate": 0.01}, 44.9),
            ({"learning_rate": 0.1}, 45.0),
            ({"learning_rate": 1.0}, 50.0),
            ({"learning_rate": 10.0}, "diverged"),
        ]
        fine = [({"learning_rate": 0.5}, 30.0), ({"learning_rate": 1.0}, 50.0), ({"learning_rate": 0.7}, "failed")]
        writer.search("dp-fedgd", 1, {"coarse": coarse, "fine": fine})
    build(tmp_path)
    assert lines(tmp_path, "hyperparameters")[0][3:] == [
        "Found in",
        "On edge",
        "Trials",
        "Diverged / failed",
        "Within 1 s.e.",
    ]
    assert lines(tmp_path, "hyperparameters")[2] == [
        *("DP-FedGD", "learning_rate = 1", "50.00", "coarse and fine"),
        *("learning_rate ↑ (fine)", "6", "1 / 1", "2"),  # 10 was tried and diverged, so 1 is not an outer edge
    ]
    assert "ties go to the lower validation loss" in caption(tmp_path, "hyperparameters")
    found = frame(tmp_path, "hyperparameters").iloc[0]
    assert (found["trials"], found["done"], found["diverged"], found["failed"]) == (6, 4, 1, 1)
    assert found["within_standard_error"] == 2


def test_outer_edges_count_over_both_grids_and_untuned_values_go_to_the_caption(tmp_path):
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedadam"])) as writer:
        coarse = [({"learning_rate": rate, "beta1": beta}, 10.0) for rate in (0.01, 0.1) for beta in (0.0, 0.9)]
        fine = [({"learning_rate": rate, "beta1": 0.5}, accuracy) for rate, accuracy in ((0.05, 20.0), (0.2, 30.0))]
        writer.search("dp-fedadam", 1, {"coarse": coarse, "fine": fine})
    build(tmp_path)
    assert lines(tmp_path, "hyperparameters")[2][1:5] == [
        *("learning_rate = 0.2, beta1 = 0.5", "30.00", "fine", "learning_rate ↑"),
    ]
    assert "Not tuned: DP-FedAdam: beta2 = 0.999, tau = 0.01." in caption(tmp_path, "hyperparameters")


def test_zoom_shows_how_far_the_fine_grid_extends(tmp_path):
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedgd"], search={"refine": "zoom"})) as writer:
        coarse = [({"learning_rate": rate}, rate) for rate in (1.0, 10.0)]
        fine = [({"learning_rate": rate}, rate) for rate in (3.0, 10.0, 30.0)]
        writer.search("dp-fedgd", 1, {"coarse": coarse, "fine": fine})
    build(tmp_path)
    assert lines(tmp_path, "hyperparameters")[0][5] == "Extended"
    assert lines(tmp_path, "hyperparameters")[2][4:6] == ["learning_rate ↑", "learning_rate ↑ to 30"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((4.0, "4"), (0.0005, "0.0005"), (0.9999995, "0.9999995"), (0.1234567890123, "0.123457")),
        *((0.1234567891, "0.1234567891"), (0.12345678912, "0.123457")),  # twelve characters, and one more
        *((True, "true"), (7, "7")),
    ],
)
def test_values_are_shown_as_people_type_them(value, shown):
    assert shown_value(value) == shown


# ---- search strategies


def test_two_strategies_are_compared(tmp_path):
    of = study(epsilons=[1], methods=["dp-fedgd", "dp-fedadam"], search={"strategies": ["grid", "optuna"]})
    with writing(tmp_path, of) as writer:
        for method in ("dp-fedgd", "dp-fedadam"):
            writer.search(method, 1, GRID)
            writer.confirm(method, 1, {"learning_rate": 0.1}, LOW)
            writer.search(
                method, 1, {"optuna": [({"learning_rate": 0.25}, 55.0), ({"learning_rate": 9}, "diverged")]}, "optuna"
            )
            writer.confirm(method, 1, {"learning_rate": 0.25}, HIGH, "optuna")
    build(tmp_path)
    assert lines(tmp_path, "search-strategies") == [
        ["Method", "Search", "Trials", "Trial-rounds", "Validation (%)", "Test (%)"],
        ["**ε = 1**", "", "", "", "", ""],
        ["DP-FedGD", "grid", "3", "60", "50.00", "41.50 ± 2.12"],
        ["DP-FedGD", "optuna", "2", "40", "55.00", "**50.50 ± 0.71**"],
        ["DP-FedAdam", "grid", "3", "60", "50.00", "41.50 ± 2.12"],
        ["DP-FedAdam", "optuna", "2", "40", "55.00", "**50.50 ± 0.71**"],
    ]
    assert lines(tmp_path, "accuracy")[2][:2] == ["DP-FedGD", "grid"]
    assert lines(tmp_path, "hyperparameters")[3][4] == "optuna"
    # each strategy is compared with DP-FedGD under the same strategy: 0.95 * 41.5 and 0.95 * 50.5
    assert lines(tmp_path, "rounds-to-95")[1:3] == [
        ["target accuracy (%)", "grid", "39.42"],
        ["target accuracy (%)", "optuna", "47.97"],
    ]
    cells = yaml.safe_load((tmp_path / "best.yaml").read_text())["cells"]
    assert list(cells) == [
        f"{SETTING} / {method} / eps 1{strategy}"
        for method in ("DP-FedGD", "DP-FedAdam")
        for strategy in ("", " (optuna)")
    ]
    assert cells[f"{SETTING} / DP-FedGD / eps 1 (optuna)"]["hyperparameters"] == {"learning_rate": 0.25}


def test_one_strategy_is_not_compared(finished):
    assert not (finished / "tables" / "search-strategies.md").exists()


# ---- rounds to 95%


@pytest.mark.parametrize(
    ("rounds", "lasts", "expected"),
    [
        (range(10, 80, 10), {70}, [10, 20, 30, 40, 50, 60, 70]),
        (range(5, 105, 5), {100}, [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]),
        ([*range(10, 160, 10), 55, 75, 119], {55, 75, 119, 150}, [20, 50, 55, 75, 80, 110, 119, 140, 150]),
        (range(1, 31), set(range(10, 30, 3)), [3, 6, 9, 12, 15, 18, 21, 24, 27, 30]),
    ],
)
def test_the_table_by_round_shows_last_rounds(rounds, lasts, expected):
    assert printed_rounds(sorted(rounds), lasts) == expected


def test_rounds_to_95_percent(finished):
    """0.95 * 41.5 = 39.425: DP-FedGD reaches it at 20 with 41.5, DP-FedAdam at 10 with 40."""
    assert lines(finished, "rounds-to-95") == [
        ["Method", "ε = 1", "ε = 8"],
        ["target accuracy (%)", "39.42", "39.42"],
        ["DP-FedGD", "20", "20"],
        ["DP-FedAdam", "**10**", "**10**"],
    ]


def test_rounds_to_95_percent_may_be_empty_and_need_dp_fedgd(tmp_path):
    with writing(tmp_path / "never", study(epsilons=[1])) as writer:
        writer.search("dp-fedgd", 1, GRID)
        writer.confirm("dp-fedgd", 1, {}, HIGH)
        writer.search("dp-fedadam", 1, GRID)
        writer.confirm("dp-fedadam", 1, {}, LOW)
    build(tmp_path / "never")
    assert lines(tmp_path / "never", "rounds-to-95")[-1] == ["DP-FedAdam", "–"]
    with writing(tmp_path / "without", study(epsilons=[1], methods=["dp-fedadam"])) as writer:
        writer.search("dp-fedadam", 1, GRID)
    build(tmp_path / "without")
    assert not (tmp_path / "without" / "tables" / "rounds-to-95.md").exists()


def one_budget(folder: Path, of: Study | None = None, /, **curves) -> None:
    """A finished study at eps 1; confirm curves by method name."""
    with writing(folder, of or study(epsilons=[1])) as writer:
        for name, came_to in curves.items():
            method = name.replace("_", "-")
            writer.search(method, 1, GRID)
            writer.confirm(method, 1, {}, came_to)
    build(folder)


def rounds_of(folder: Path) -> list[str]:
    return [line[1] for line in lines(folder, "rounds-to-95")[1:]]


def test_exactly_95_percent_is_enough(tmp_path):
    """0.95 * 40 = 38, and 38 at round 10 is enough."""
    plain = {seed: {10: 20.0, 20: 40.0} for seed in (42, 7)}
    one_budget(tmp_path, dp_fedgd=plain, dp_fedadam={seed: {10: 38.0, 20: 39.0} for seed in (42, 7)})
    assert rounds_of(tmp_path) == ["38.00", "20", "**10**"]


def test_95_percent_refers_to_the_last_round_not_the_best(tmp_path):
    falling = {seed: {10: 60.0, 20: 40.0} for seed in (42, 7)}
    one_budget(tmp_path, dp_fedgd=falling, dp_fedadam={seed: {10: 39.0, 20: 70.0} for seed in (42, 7)})
    assert rounds_of(tmp_path) == ["38.00", "**10**", "**10**"]


def test_95_percent_needs_all_seeds(tmp_path):
    """At round 10 only one seed of DP-FedAdam has a score, a high one; DP-FedGD lacks a seed's last one."""
    plain = {seed: {10: 20.0, 20: 40.0} for seed in (42, 7)}
    one_budget(tmp_path / "method", dp_fedgd=plain, dp_fedadam={42: {10: 50.0, 20: 50.0}, 7: {20: 50.0}})
    assert rounds_of(tmp_path / "method") == ["38.00", "**20**", "**20**"]
    short = {42: {10: 20.0, 20: 40.0}, 7: ("diverged", 20, {10: 20.0, 20: 40.0})}
    one_budget(tmp_path / "plain", dp_fedgd=short, dp_fedadam=plain)
    assert rounds_of(tmp_path / "plain") == ["–", "–", "–"]


# ---- paired differences over seeds


def write_seeds(folder: Path, scores: dict[str, list[float]], epsilons=(1,), **changes) -> None:
    """Methods with these final scores, seed by seed, the same at every budget."""
    of = study(methods=list(scores), epsilons=list(epsilons), seeds={"confirm": list(range(5))}, **changes)
    with writing(folder, of) as writer:
        for method, values in scores.items():
            for epsilon in epsilons:
                writer.search(method, epsilon, GRID)
                writer.confirm(method, epsilon, {}, {seed: {LAST: value} for seed, value in enumerate(values)})
    build(folder)


A, B, C = [50.0, 52.0, 51.0, 49.0, 53.0], [50.5, 51.0, 51.5, 49.5, 52.0], [40.0, 43.0, 41.0, 40.0, 42.0]


def test_methods_not_significantly_behind_are_bold(tmp_path):
    write_seeds(tmp_path, {"dp-fedgd": A, "dp-fedadam": B, "dp-fedyogi": C})
    column = [line[2] for line in lines(tmp_path, "accuracy")[2:]]
    assert column == ["**51.00 ± 1.58**", "**50.90 ± 0.96**", "41.20 ± 1.30"]
    assert "all that do not differ significantly from it" in caption(tmp_path, "accuracy")


def test_differences_agree_with_scipy(tmp_path):
    write_seeds(tmp_path, {"dp-fedgd": A, "dp-fedadam": B, "dp-fedyogi": C}, epsilons=(1, 8))
    found = frame(tmp_path, "differences")
    assert found["reference"].unique().tolist() == ["DP-FedYogi"]
    assert len(found) == 4
    for method, scores in (("DP-FedGD", A), ("DP-FedAdam", B)):
        expected = stats.ttest_rel(C, scores)
        interval = expected.confidence_interval(0.95)
        for _, line in found[found["method"] == method].iterrows():
            assert line["difference"] == pytest.approx(np.mean(np.subtract(C, scores)))
            assert line["p"] == pytest.approx(expected.pvalue, rel=1e-6)
            assert (line["low"], line["high"]) == pytest.approx((interval.low, interval.high))
    assert found["p_holm"].tolist() == pytest.approx(stats_holm(found["p"].tolist()))
    assert lines(tmp_path, "differences")[0] == ["Method", "Difference", "95% interval", "Seeds", "p", "p (Holm)"]


def stats_holm(values: list[float]) -> list[float]:
    """By its definition: the k-th smallest times (m - k + 1), never below one before it."""
    ordered = sorted(values)
    return [min(1.0, max((len(values) - k) * ordered[k] for k in range(ordered.index(value) + 1))) for value in values]


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_is_between_no_correction_and_bonferroni(values):
    found = holm(values)
    for p, corrected in zip(values, found, strict=True):
        assert p <= corrected <= min(1.0, len(values) * p) + 1e-12
    assert [corrected for _, corrected in sorted(zip(values, found, strict=True))] == sorted(found)


def test_a_larger_budget_that_is_worse_is_noted_with_its_reason(tmp_path):
    of = study(methods=["dp-fedgd"], seeds={"confirm": [1, 2, 3]})
    with writing(tmp_path, of) as writer:
        for epsilon, score in ((1, 60.0), (8, 50.0)):
            coarse = [({"learning_rate": rate}, 40 + 10 * rate) for rate in (0.1, 0.5, 1.0)]
            writer.search("dp-fedgd", epsilon, {"coarse": coarse})
            writer.confirm("dp-fedgd", epsilon, {"learning_rate": 1.0}, {k: {LAST: score + k / 10} for k in (1, 2, 3)})
    build(tmp_path)
    warning = (
        "DP-FedGD at ε = 8 is 10.00 worse than at ε = 1, a significant difference over the seeds: its winner lies on "
        "an edge"
    )
    assert warning in caption(tmp_path, "accuracy")
    assert warning in (tmp_path / "tables" / "README.md").read_text()


# ---- partition and noise


def test_the_standard_deviation_is_split_into_partition_and_noise():
    """Balanced, two runs each: within, (0.5 + 0.5 + 0.5) / 3 = 0.5; means 0.5, 10.5, 20.5, so between is 2 * 100 = 200;
    the partition's variance is (200 - 0.5) / 2."""
    found = split({1: [0.0, 1.0], 2: [10.0, 11.0], 3: [20.0, 21.0]})
    assert found.noise == pytest.approx(0.5**0.5)
    assert found.partition == pytest.approx(99.75**0.5)
    assert split({1: [1.0, 3.0], 2: [2.0, 2.0]}).partition == 0, "never negative"
    assert split({1: [1.0], 2: [2.0]}) is None
    assert split({1: [1.0, 2.0]}) is None


def test_groups_are_weighted_by_size():
    """One run at 0, three around 6: the mean is 4.5, within is (4 + 4) / 2, between 4.5^2 + 3 * 1.5^2 = 27; a group
    counts as (4 - (1 + 9) / 4) = 1.5 runs."""
    found = split({1: [0.0], 2: [4.0, 6.0, 8.0]})
    assert (found.noise, found.partition) == pytest.approx((2, (23 / 1.5) ** 0.5))


def test_known_deviations_are_recovered_from_groups_of_any_size():
    rng = np.random.default_rng(1)
    groups = {k: (3 * rng.standard_normal() + rng.standard_normal(2 + k % 3)).tolist() for k in range(400)}
    found = split(groups)
    assert (found.partition, found.noise) == pytest.approx((3, 1), rel=0.1)


# ---- how winners were chosen


def test_selection_shows_what_one_seed_would_have_chosen(tmp_path):
    """Three search seeds: 1.0 is best on the first, 0.1 on average and in the contest."""
    seeds = {"search": [1, 2, 3], "contest": [4, 5], "confirm": [42, 7]}
    of = study(methods=["dp-fedgd"], epsilons=[1], seeds=seeds)
    scores = {0.1: [50.0, 54.0, 52.0, 53.0, 55.0], 1.0: [58.0, 40.0, 42.0, 41.0, 41.0]}
    with writing(tmp_path, of) as writer:
        keys = {"coarse": [], "contest": []}
        for rate, values in scores.items():
            for seed, value in enumerate(values, start=1):
                trial = writer.trial("dp-fedgd", 1, {"learning_rate": rate}, seed, confirm=False)
                writer.ledger.add([row(trial, {LAST: value})])
                keys["coarse" if seed < 4 else "contest"].append(trial.key)
        for stage, members in keys.items():
            writer.ledger.add_stage(writer.cell("dp-fedgd", 1), "grid", stage, members)
        writer.confirm("dp-fedgd", 1, {"learning_rate": 0.1}, LOW)
    build(tmp_path)
    assert lines(tmp_path, "selection")[2:] == [
        *[["DP-FedGD", "learning_rate = 1", "learning_rate = 0.1", "54.00 ± 1.41", "41.50 ± 2.12", "12.50", "1"]]
    ]
    assert lines(tmp_path, "hyperparameters")[2][1:4] == ["learning_rate = 0.1", "54.00 ± 1.41", "coarse"]
    assert frame(tmp_path, "hyperparameters")["trials"].tolist() == [10]


# ---- McNemar


@pytest.mark.parametrize(
    ("n10", "n01", "statistic", "p", "sign"),
    [
        (529, 700, 23.515, 0.0000, "-"),  # the paper's table 15: DP-FedSOFIM against DP-FedGD at 0.5
        (1258, 1172, 2.973, 0.0847, "+"),
        (499, 547, 2.112, 0.1462, "-"),
        (575, 573, 0.001, 0.9765, "+"),
        (0, 0, 0.0, 1.0, "="),
        (3, 3, 0.0, 1.0, "="),
        (1, 0, 0.0, 1.0, "+"),  # (|1 - 0| - 1)^2 = 0
    ],
)
def test_mcnemar_reproduces_the_papers_numbers(n10, n01, statistic, p, sign):
    found = Comparison(n10, n01, n10 + n01)  # one seed: every row that differs counts once
    assert (round(found.chi2, 3), round(found.p, 4), found.sign) == (statistic, p, sign)


def test_mcnemar_counts_only_rows_not_padding():
    """10 rows in 2 bytes. Reference right on 0..5, other right on 4..7: n10 = {0,1,2,3}, n01 = {6,7}."""
    rows = np.arange(10)
    reference, other = np.packbits(rows < 6).tobytes(), np.packbits((rows >= 4) & (rows < 8)).tobytes()
    assert Comparison.of([(reference, other)], 10) == Comparison(n10=4, n01=2, squares=6)
    padded = bytes([reference[0], reference[1] | 0b00111111])
    assert Comparison.of([(padded, other)], 10) == Comparison(n10=4, n01=2, squares=6)


def test_mcnemar_counts_a_row_as_one_observation_with_any_number_of_seeds():
    """Five identical seeds are no more evidence than one; pooled as if independent, p would be 1e-7."""
    rows = np.arange(200)
    reference, other = np.packbits(rows < 40).tobytes(), np.packbits((rows >= 20) & (rows < 46)).tobytes()
    one, five = (Comparison.of([(reference, other)] * seeds, 200) for seeds in (1, 5))
    assert (one.n10, one.n01, five.n10, five.n01) == (20, 6, 100, 30)
    assert five.chi2 == pytest.approx((5 * 14 - 1) ** 2 / (25 * 26))
    assert one.p == pytest.approx(0.0108, abs=1e-4)
    assert 0.005 < five.p < one.p
    # a row that one seed has right and another wrong favours neither
    mixed = Comparison.of([(reference, other), (other, reference)], 200)
    assert (mixed.n10, mixed.n01, mixed.squares, mixed.p) == (26, 26, 0, 1.0)


def test_mcnemar_table(finished):
    """Of 20 rows DP-FedAdam has the first 10 right, DP-FedGD the first 8: n10 = 2, n01 = 0, (2 - 1)^2 / 2 = 0.5."""
    assert lines(finished, "mcnemar")[:3] == [
        ["Method", "Accuracy (%)", "n10", "n01", "χ²", "p", "p (Holm)", "Sign"],
        ["**ε = 1: DP-FedAdam 50.00 %**", "", "", "", "", "", "", ""],
        ["DP-FedGD", "40.00", "2", "0", "0.500", "0.4795", "0.9590", "+"],
    ]
    assert "on the 20 test rows after the last round, over all 2 confirm seeds" in caption(finished, "mcnemar")
    assert frame(finished, "mcnemar")["seeds"].tolist() == [42, 42], "the other seed has no bits"


def test_mcnemar_uses_the_reference_of_the_study(tmp_path):
    write_finished(tmp_path, study(compare_to="dp-fedgd"))
    build(tmp_path)
    assert lines(tmp_path, "mcnemar")[2] == ["DP-FedAdam", "50.00", "0", "2", "0.500", "0.4795", "0.9590", "-"]


def test_a_very_small_p_value_is_a_bound_and_bold(tmp_path):
    with writing(tmp_path, study(epsilons=[1])) as writer:
        for method, correct in (("dp-fedgd", b"\x00\x00\x00"), ("dp-fedadam", b"\xff\xff\xf0")):
            writer.search(method, 1, GRID)
            writer.confirm(method, 1, {}, LOW, correct={42: correct})
    build(tmp_path)
    # (20 - 1)^2 / 20 = 18.05
    assert lines(tmp_path, "mcnemar")[2][2:] == ["20", "0", "18.050", "<0.0001", "**<0.0001**", "+"]


# ---- privacy


def test_privacy_shows_claimed_and_actual_epsilon(tmp_path):
    with writing(tmp_path, study(epsilons=[1])) as writer:
        writer.search("dp-fedgd", 1, GRID)
        writer.confirm("dp-fedgd", 1, {}, LOW, epsilon_local=0.99999, epsilon_secure=0.45731)
        writer.search("dp-fedadam", 1, GRID)
        writer.confirm("dp-fedadam", 1, {}, HIGH, epsilon_local=4.2, epsilon_secure=1.0)
    build(tmp_path)
    assert [line[:6] for line in lines(tmp_path, "privacy")[2:]] == [
        ["DP-FedGD", "1", "1", "0.4574", "2.443", "local and secure aggregation"],
        ["DP-FedAdam", "1", "4.2", "1", "10.99", "secure aggregation"],
    ]
    # three runs of a search and two seeds: mu times the root of five
    found = pd.read_csv(tmp_path / "tables" / "privacy.csv")
    five = [epsilon_of(mu_of(actual, 1e-5) * math.sqrt(5), 1e-5) for actual in (0.99999, 4.2)]
    assert found["epsilon_with_search"].tolist() == pytest.approx(five)
    assert found["rho_zcdp"].tolist() == pytest.approx([mu_of(actual, 1e-5) ** 2 / 2 for actual in (0.99999, 4.2)])
    assert "adjacency replace-one" in caption(tmp_path, "privacy")
    assert "share their noise" in caption(tmp_path, "privacy")
    assert "**" not in "".join(line[1] for line in lines(tmp_path, "accuracy")[2:]), "too little noise is never best"


def test_the_largest_epsilon_of_several_seeds_is_shown(tmp_path):
    """Seeds may draw different cohorts, so their actual eps may differ."""
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedgd"])) as writer:
        writer.search("dp-fedgd", 1, GRID)
        better = {"epsilon_local": 0.9, "epsilon_secure": 0.5, "epsilon_unsampled": 0.9}
        worse = {"epsilon_local": 1.5, "epsilon_secure": 0.6, "epsilon_unsampled": 1.5}
        for seed, actual in ((42, better), (7, worse)):
            trial = writer.trial("dp-fedgd", 1, {}, seed, confirm=True)
            writer.ledger.add([row(trial, LOW[seed], **actual)])
            writer.ledger.add_stage(writer.cell("dp-fedgd", 1), "grid", "confirm", [trial.key], start=seed == 7)
    build(tmp_path)
    table = lines(tmp_path, "privacy")
    shown = dict(zip(table[0], table[2], strict=True))
    assert shown["Actual ε, local"] == "1.5"
    assert shown["Actual ε, secure aggregation"] == "0.6"
    assert shown["Claim holds for"] == "secure aggregation"
    together = epsilon_of(mu_of(1.5, 1e-5) * math.sqrt(3 + 2), 1e-5)
    found = frame(tmp_path, "privacy")
    assert found["epsilon_with_search"].tolist() == pytest.approx([together])
    assert found["mu"].tolist() == pytest.approx([mu_of(1.5, 1e-5)])
    with Ledger.read(tmp_path) as ledger:
        assert frames.cells(Results.read(ledger))["epsilon_actual"].tolist() == [1.5]


def test_epsilon_without_credit_for_sampling_is_shown(tmp_path):
    """In a separate column, only if some method samples."""
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedgd", "dp-fedadamw"])) as writer:
        for method, unsampled in (("dp-fedgd", 1.0), ("dp-fedadamw", 7.25)):
            writer.search(method, 1, {})
            writer.confirm(method, 1, {}, LOW, epsilon_local=1.0, epsilon_secure=0.5, epsilon_unsampled=unsampled)
    build(tmp_path)
    table = lines(tmp_path, "privacy")
    assert table[0][1:5] == ["Claimed ε", "Actual ε, local", "Actual ε, secure aggregation", "Actual ε, samples known"]
    assert [line[4] for line in table[2:]] == ["1", "7.25"]
    assert "knows which rows or users were sampled" in caption(tmp_path, "privacy")


@pytest.mark.parametrize("release", ["local", "secure-aggregation"])
def test_a_claim_is_checked_in_its_own_release_model(tmp_path, release):
    """Two methods keep their claim locally, two in the sum. The others have better scores and are not bold."""
    keep = {"local": ["dp-fedgd", "dp-fedsgd"], "secure-aggregation": ["dp-fedadam", "dp-fedyogi"]}
    of = study(epsilons=[1], privacy={"release": release}, methods=[*keep["local"], *keep["secure-aggregation"]])
    with writing(tmp_path, of) as writer:
        for method in (method.name for method in of.methods):
            local, secure = (1.0, 3.0) if method in keep["local"] else (3.0, 1.0)
            writer.search(method, 1, {})
            curves = LOW if method in keep[release] else HIGH
            writer.confirm(method, 1, {}, curves, epsilon_local=local, epsilon_secure=secure, epsilon_unsampled=1.0)
    build(tmp_path)
    bold = [line[0] for line in lines(tmp_path, "accuracy")[2:] if "**" in line[1]]
    assert bold == [methods.get(name).title for name in keep[release]]


def test_methods_run_as_released_are_never_bold(tmp_path):
    """Even if the claim holds: they are baselines."""
    released = {"name": "dp-scaffold", "label": "released", "fixed": {"as_released": True, "local_steps": 1}}
    of = study(epsilons=[1], methods=["dp-fedgd", "dp-fedadam", released])
    with writing(tmp_path, of) as writer:
        for method in ("dp-fedgd", "dp-fedadam"):
            writer.search(method, 1, GRID)
            writer.confirm(method, 1, {}, LOW)
        writer.search("dp-scaffold", 1, {}, label=of.methods[2].shown)
        writer.confirm("dp-scaffold", 1, {"as_released": True}, HIGH, label=of.methods[2].shown)
    build(tmp_path)
    shown = {line[0]: line[1:] for line in lines(tmp_path, "accuracy")[2:]}
    assert all("**" in text for text in shown["DP-FedGD"])
    assert shown[of.methods[2].shown] == ["40.00 ± 1.41", "50.50 ± 0.71"]


def test_an_infinite_budget_is_the_non_private_arm(tmp_path):
    with writing(tmp_path, study(epsilons=[math.inf], methods=["dp-fedgd"])) as writer:
        writer.search("dp-fedgd", math.inf, GRID)
        writer.confirm("dp-fedgd", math.inf, {}, LOW)
    build(tmp_path)
    assert lines(tmp_path, "privacy")[1:] == [
        ["**ε = ∞**", *[""] * 8],
        ["DP-FedGD", "∞", "∞", "∞", "∞", "no privacy claimed", "–", "–", "–"],
    ]
    assert (
        yaml.safe_load((tmp_path / "best.yaml").read_text())["cells"][f"{SETTING} / DP-FedGD / eps inf"]["epsilon"]
        == math.inf
    )


@pytest.mark.parametrize(
    ("epsilon", "shown"), [(0.45731, "0.4574"), (1.0, "1"), (10.0, "10"), (0.99999996, "1"), (12345.6, "12350")]
)
def test_an_epsilon_is_rounded_to_the_safe_side(epsilon, shown):
    assert rounded_up(epsilon) == shown


# ---- timing


def test_timing_has_its_own_folder(finished):
    """Every trial took 2 seconds for 20 rounds; per method 2 budgets x 2 seeds, and 2 x 3 search trials."""
    text = (finished / "timing" / "seconds-per-round.md").read_text()
    assert "share of its pack's" in text
    found = pd.read_csv(finished / "timing" / "seconds-per-round.csv")
    assert found["confirm_seconds"].tolist() == found["search_seconds"].tolist() == [0.1, 0.1]
    assert (found["confirm_trials"].tolist(), found["search_trials"].tolist()) == ([4, 4], [6, 6])


# ---- best.yaml


def test_best_reproduces_the_confirm_trial(finished):
    entry = read_best(finished / "best.yaml")[f"{SETTING} / DP-FedAdam / eps 8"]
    assert entry["data"] == "synthetic-frozen:600,20,12,4"
    assert entry["test_accuracy"] == {42: 50.0, 7: 51.0}
    again = TrialSpec(
        problem=ProblemSpec(
            data=DataSpec(
                fingerprint=entry["fingerprint"],
                validation_fraction=entry["validation_fraction"],
                validation_seed=entry["validation_seed"],
            ),
            partition=partition.parse(entry["partition"], clients=entry["clients"], seed=entry["partition_seed"]),
            train_on=entry["train_on"],
            evaluate_on=entry["evaluate_on"],
        ),
        method=entry["method"],
        hyperparameters=entry["hyperparameters"],
        privacy=PrivacySettings(**{name: entry[name] for name in PrivacySettings.model_fields}),
        rounds=entry["rounds"],
        evaluate_every=entry["evaluate_every"],
        seed=7,
    )
    with Ledger.read(finished) as ledger:
        keys = ledger.stages()[cell_id(study(), "DP-FedAdam", 8), "grid", "confirm"]
    assert again.key == keys[1]


def test_a_part_of_the_name_of_a_cell_is_enough_if_it_fits_one(finished):
    with pytest.raises(UserError, match="differs from the data of the sweep"):  # found; its data are made up
        training.from_best(finished / "best.yaml", "FedAdam / eps 8", 42, None)
    for part, why in ((None, "fits several cells"), ("eps", "fits several cells"), ("Newton", "is not in")):
        with pytest.raises(UserError, match=rf"cell = {part!r} {why} .*it has: '.*DP-FedGD.*FedAdam"):
            training.from_best(finished / "best.yaml", part, 42, None)


def test_the_end_of_a_cells_name_is_enough_if_another_name_continues(tmp_path):
    """eps 1 is a part of eps 10."""
    cells = {
        f"data / iid / {method} / eps {epsilon}": {} for method in ("DP-FedGD", "DP-FedAdam") for epsilon in (1, 10)
    }
    with pytest.raises(UserError, match="'method'"):  # found; it is empty
        training.from_cells(cells, "best.yaml", "DP-FedGD / eps 1", 42, None)
    with pytest.raises(UserError, match="fits several cells"):
        training.from_cells(cells, "best.yaml", "eps 1", 42, None)


def test_an_unfinished_study_has_no_cell_to_train_from(tmp_path):
    with pytest.raises(UserError, match=r"best\.yaml has no cell yet: no search has ended"):
        training.from_cells({}, tmp_path / "best.yaml", None, 42, None)


@pytest.mark.parametrize("text", ["cells: [", "cells: 3", "- a", ""])
def test_other_files_than_best_yaml_are_refused(tmp_path, text):
    (tmp_path / "best.yaml").write_text(text)
    with pytest.raises(UserError, match=r"best\.yaml"):
        read_best(tmp_path / "best.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        read_best(tmp_path / "other.yaml")


# ---- files


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "ledger" not in path.name]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_rebuilt_tables_are_byte_identical_and_leave_nothing_behind(finished):
    before = digests(finished)
    written = build(finished)
    assert digests(finished) == before
    assert sorted(str(path.relative_to(finished)) for path in written) == sorted(before)
    assert len(written) == len(set(written))


def test_tables_do_not_depend_on_the_order_in_which_trials_ended(tmp_path):
    for name, order in (("a", (0, 1)), ("b", (1, 0))):
        with writing(tmp_path / name, study(epsilons=[1])) as writer:
            for which in order:
                method, curves = (("dp-fedgd", LOW), ("dp-fedadam", HIGH))[which]
                writer.search(method, 1, GRID)
                writer.confirm(method, 1, {}, curves)
        build(tmp_path / name)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_several_settings_have_separate_files(tmp_path):
    """Even if their names differ only in characters that file names leave out."""
    write_finished(tmp_path)
    build(tmp_path)
    assert (tmp_path / "tables" / "accuracy.md").exists()
    data = [*study().data, {"source": "b", "label": "TOY"}, {"source": "folder/other.npz"}]
    grown = study(data=data)
    with writing(tmp_path, grown, setting="TOY / iid") as writer:
        writer.search("dp-fedgd", 1, GRID)
    with writing(tmp_path, grown, setting="other / iid") as writer:
        writer.search("dp-fedgd", 1, GRID)
    build(tmp_path)
    found = sorted(path.name for path in (tmp_path / "tables").glob("accuracy*.md"))
    assert found == ["accuracy-other-iid.md", "accuracy-toy-iid-2.md", "accuracy-toy-iid.md"]  # and no accuracy.md
    page = (tmp_path / "tables" / "README.md").read_text()
    assert page.index("### toy / iid") < page.index("### TOY / iid") < page.index("### other / iid")
    timing = pd.read_csv(tmp_path / "timing" / "seconds-per-round.csv")
    assert timing["setting"].drop_duplicates().tolist() == ["toy / iid", "TOY / iid", "other / iid"]


def check_markdown(text: str) -> None:
    """Parsed as Markdown: only table markup, and links only to neighbouring files."""
    parsed = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)
    inline = [child for token in parsed for child in token.children or []]
    links = [token.attrs["href"] for token in inline if token.type == "link_open"]
    assert all(re.fullmatch(r"(\.\./)?[a-z0-9.-]+/?", str(link)) for link in links)
    kinds = {token.type.removesuffix("_open").removesuffix("_close") for token in [*parsed, *inline]}
    page = {"bullet_list", "list_item", "em", "code_inline", "link", "softbreak"} if links else set()
    table = {
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "heading",
        "paragraph",
        "inline",
        "text",
        "text_special",
        "strong",
    }
    assert kinds <= table | page
    if links:
        assert {token.content for token in inline if token.type == "code_inline"} == {
            *("\\input", "\\usepackage{booktabs}", "fedsweep train --from", "fedsweep tables"),
        }


HOSTILE = '../../x|y\n# <script>a_b*[c](http://d)$\\e{f}&lt;%~^"'


def test_hostile_names_neither_leave_the_folder_nor_become_markup(tmp_path):
    label = '=1+1,"|`x`\r\n\\input{y}_&#'
    data = [{"source": "a", "label": HOSTILE}, {"source": "b", "label": "plain"}]
    methods_given = [{"name": "dp-fedgd", "label": label}, "dp-fedadam"]
    of = study(data=data, methods=methods_given, epsilons=[1], compare_to=label)
    folder = tmp_path / "results"
    for setting in (f"{HOSTILE} / iid", "plain / iid"):
        with writing(folder, of, setting=setting) as writer:
            writer.search("dp-fedgd", 1, GRID, label=label)
            writer.confirm("dp-fedgd", 1, {}, LOW, label=label)
            writer.search("dp-fedadam", 1, GRID)
            writer.confirm("dp-fedadam", 1, {}, HIGH)
    written = build(folder)
    assert {path.parent for path in written} == {folder, folder / "tables", folder / "timing"}
    assert {path.name for path in tmp_path.iterdir()} == {"results"}
    stems = {path.stem for path in written if path.parent.name == "tables" and path.stem != "README"}
    assert all(set(stem) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for stem in stems)
    for path in written:
        text = path.read_bytes().decode("utf-8")
        if path.suffix == ".md":
            check_markdown(text)
        if path.suffix == ".tex":
            assert "\\input" not in text
            bare = text.replace("\\\\", "").replace("\\{", "").replace("\\}", "")
            assert bare.count("{") == bare.count("}")
        if path.suffix == ".csv":
            header, *rest = list(csv.reader(io.StringIO(text, newline="")))
            assert all(len(line) == len(header) for line in rest)
    shown = (folder / "tables" / "accuracy-plain-iid.md").read_text()
    rows = MarkdownIt("commonmark").enable("table").parse(shown)
    texts = ["".join(c.content for c in token.children) for token in rows if token.type == "inline"]
    assert label.replace("\r\n", "  ") in texts  # unchanged for the reader
    accuracies = [pd.read_csv(path) for path in written if path.name.startswith("accuracy") and path.suffix == ".csv"]
    # on one line, with an apostrophe against formulas
    expected = {"'" + label.replace("\r\n", "  "), "DP-FedAdam"}
    assert {name for found in accuracies for name in found["method"]} == expected
    assert f"{HOSTILE} / iid / {label} / eps 1" in yaml.safe_load((folder / "best.yaml").read_text())["cells"]


@pytest.mark.parametrize(
    ("text", "markdown", "latex"),
    [
        ("a|b", r"a\|b", r"a\textbar{}b"),
        ("a\nb", "a b", "a b"),
        ("learning_rate _x_", r"learning_rate \_x\_", r"learning\_rate \_x\_"),
        ("<b> <0.1", r"\<b> <0.1", r"\textless{}b\textgreater{} \textless{}0.1"),
        ("5 % & $", r"5 % & \$", r"5 \% \& \$"),
        ("1 ± 2", "1 ± 2", r"1 $\pm$ 2"),
        ("[x] *", r"\[x\] \*", "{[}x{]} {*}"),
        ("\\\u202e\x1b", "\\\\  ", r"\textbackslash{}  "),
    ],
)
def test_text_is_escaped(text, markdown, latex):
    assert render.markdown_text(text) == markdown
    assert render.latex_text(text) == latex


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *((f"{start}1+1", f"'{start}1+1") for start in "=+-@"),
        *((f"{blank}=1+1", "' =1+1") for blank in "\t\r\n "),
        ("x=1", "x=1"),
        ("a\rb,c", "a b,c"),  # a bare carriage return ends a line for many readers
    ],
)
def test_csv_cells_are_neither_formulas_nor_line_breaks(text, shown):
    table = render.Table("", "", "", [], "", [], pd.DataFrame({"a": [text], "b": [-1.5]}))
    assert list(csv.reader(io.StringIO(render.to_csv(table), newline=""))) == [["a", "b"], [shown, "-1.5"]]


def test_latex_is_a_whole_table(finished):
    text = (finished / "tables" / "accuracy.tex").read_text()
    assert text.startswith("% needs \\usepackage{booktabs}\n% If the data are private")
    assert text.endswith("\\bottomrule\n\\end{tabular}\n\\end{table}\n")
    assert "DP-FedAdam & \\textbf{40.00 $\\pm$ 1.41} & \\textbf{50.50 $\\pm$ 0.71} \\\\\n" in text
    assert "\\multicolumn{3}{l}{$\\varepsilon$ = 1} \\\\\n" in text


def test_the_index_links_every_table_and_shows_the_final_round(finished):
    page = (finished / "tables" / "README.md").read_text()
    for path in (finished / "tables").glob("*.*"):
        assert path.name == "README.md" or f"({path.name})" in page
    assert "The study is finished." in page
    assert "| DP-FedAdam | **50.50 ± 0.71** | **50.50 ± 0.71** |" in page


def test_a_failed_write_leaves_the_old_table(tmp_path, monkeypatch):
    render.write_text(tmp_path / "t.md", "old")

    def no_space(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OSError, match="No space"):
        render.write_text(tmp_path / "t.md", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("t.md", "old")]
