"""The search without Ray: when stages open, which configuration wins, and how an interrupted search resumes.

A pure function of the configuration replaces training, so every test knows the winner in advance.
"""

import dataclasses
import itertools
import json
import math
import statistics
from collections import Counter

import numpy as np
import optuna
import pytest
from handmade_ledgers import cell_id
from hypothesis import given
from hypothesis import strategies as st
from simulated_search import DATA, GD, SOFIM, cell, drive, near, row, study

import search_spaces
from benchmarks import regret
from orchestrator.bench import regret as regrets
from orchestrator.execution import planning, study_run
from orchestrator.execution.cell_search import CellSearch
from orchestrator.execution.planning import plan
from orchestrator.execution.progress import View
from orchestrator.execution.sweep import Sweep
from orchestrator.report.export import export
from orchestrator.report.html.data import gather
from orchestrator.report.tables import write_tables
from orchestrator.results import status
from orchestrator.results.best_file import read_best
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results
from orchestrator.search import optuna_samplers
from orchestrator.search.candidates import candidates_of, paired_difference
from orchestrator.search.objective import ACCURACY, objective_of
from orchestrator.search.running_best import RunningBest
from orchestrator.search.selection import choose, ranked, win_contest
from orchestrator.search.strategies.halving import HalvingSettings
from orchestrator.search.strategies.optuna import Optuna
from orchestrator.study.cells import Cell, PreparedStudy
from orchestrator.study.extension import check_extension
from trainables.errors import UserError
from trainables.federation.pack import plan_of
from trainables.federation.trial_spec import TrialSpec


def rates(trials: list[TrialSpec]) -> list[float]:
    return [trial.hyperparameters["learning_rate"] for trial in trials]


# ---- stages


def test_stages_open_in_order(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        sweep = Sweep(PreparedStudy.prepare(study(methods=[GD])), ledger)

        def end_all() -> list[TrialSpec]:
            ended = list(sweep.waiting.values())
            sweep.ended({trial.key: near(0.3)(trial) for trial in ended})
            return ended

        coarse = end_all()
        assert rates(coarse) == [0.01, 0.1, 1.0]
        fine = end_all()
        assert rates(fine) == [0.05, 0.3, 0.5], "0.1 ran in the coarse stage"
        assert not sweep.finished
        confirm = end_all()
        assert [(rate, trial.seed) for rate, trial in zip(rates(confirm), confirm, strict=True)] == [
            (0.3, 42),
            (0.3, 7),
        ]
        assert sweep.finished
        assert not sweep.waiting


def test_rounds_seeds_and_rows_of_each_stage(tmp_path):
    of = study(rounds={"coarse": 3, "fine": 4, "confirm": 6}, seeds={"search": 5, "confirm": [1, 2]})
    ran = drive(tmp_path, of, near(0.3))
    for title in ("DP-FedGD", "DP-FedSOFIM"):
        for stage, rounds in (("coarse", 3), ("fine", 4)):
            for trial in ran.of(title, stage):
                assert (trial.rounds, trial.seed, trial.stop_after) == (rounds, 5, None)
                assert (trial.problem.train_on, trial.problem.evaluate_on) == ("train", "validation")
        confirm = ran.of(title, "confirm")
        assert [trial.seed for trial in confirm] == [1, 2]
        assert {trial.rounds for trial in confirm} == {6}
        assert {(t.problem.train_on, t.problem.evaluate_on) for t in confirm} == {("all", "test")}
    on_test = [trial for trial in ran.trials if trial.problem.evaluate_on == "test"]
    assert len(on_test) == 4, "only the confirm stage uses test data"


def test_cells_progress_independently(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        sweep = Sweep(PreparedStudy.prepare(study()), ledger)
        gd = [trial for trial in sweep.waiting.values() if trial.method == "dp-fedgd"]
        sweep.ended({trial.key: near(0.3)(trial) for trial in gd})
        assert Counter(trial.method for trial in sweep.waiting.values()) == {"dp-fedsofim": 4, "dp-fedgd": 3}


def test_a_configuration_in_both_grids_runs_once(tmp_path):
    ran = drive(tmp_path, study(methods=[GD]), near(0.3))
    assert rates(ran.of("DP-FedGD", "coarse")) == [0.01, 0.1, 1.0]
    assert rates(ran.of("DP-FedGD", "fine")) == [0.05, 0.1, 0.3, 0.5]
    assert len(ran.trials) == 3 + 4 - 1 + 2
    assert len({trial.key for trial in ran.trials}) == len(ran.trials)


def test_different_rounds_make_a_different_trial(tmp_path):
    ran = drive(tmp_path, study(methods=[GD], rounds={"coarse": 3, "fine": 4, "confirm": 6}), near(0.3))
    assert len(ran.trials) == 3 + 4 + 2


def test_a_trial_shared_by_two_cells_runs_once(tmp_path):
    """Two variants with identical trials: both cells finish, and the second one computes nothing."""
    of = study(methods=[GD, {**GD, "label": "again", "scale": {"learning_rate": "log"}}])
    ran = drive(tmp_path, of, near(0.3))
    assert ran.finished
    assert len(ran.trials) == 8
    for stage in ("coarse", "fine", "confirm"):
        assert ran.of("DP-FedGD", stage) == ran.of("again", stage) != []


def test_methods_that_differ_only_in_their_label_are_refused():
    with pytest.raises(ValueError, match="methods DP-FedGD and again differ in their label only"):
        study(methods=[GD, {**GD, "label": "again"}])


def test_renaming_labels_recomputes_nothing_and_keeps_every_result(tmp_path):
    before = drive(tmp_path, study(), near(0.3))
    renamed = study(
        data=[{"source": DATA, "label": "other name", "backbone": "net"}], methods=[GD, {**SOFIM, "label": "ours"}]
    )
    again = drive(tmp_path, renamed, near(0.3))
    assert again.finished
    assert again.trials == []
    assert again.stages == before.stages
    with Ledger.read(tmp_path) as ledger:
        results = Results.read(ledger)
    assert results.settings == ("other name / net / iid",)
    assert [cell.method.shown for cell in results.cells] == ["DP-FedGD", "ours"]
    assert all(len(cell.confirm) == 2 and cell.search.chosen for cell in results.cells)


def test_a_folder_with_different_trials_in_a_stage_is_refused(tmp_path):
    """For example, because a new version of the program interprets the study differently."""
    with Ledger.write(tmp_path) as ledger:
        ledger.add_stage(cell_id(study(), "DP-FedGD", 8), "grid", "coarse", ["0" * 24, "1" * 24])
        sentence = f"other trials for stage coarse of '{cell('DP-FedGD')}' than this folder holds: another version"
        with pytest.raises(UserError, match=sentence):
            Sweep(PreparedStudy.prepare(study()), ledger)


def test_the_plan_accounts_for_local_steps(monkeypatch):
    """Apart from the start-up time, five times the steps take five times as long."""
    monkeypatch.setattr(planning.machine_speed, "gemm_rate", lambda: 1e6)
    monkeypatch.setattr(planning, "contention", lambda *_: 1.0)

    def seconds(steps: int) -> float:
        axes = {"server_learning_rate": [0.1]}
        method = {"name": "dp-fedavg", "fixed": {"local_steps": steps}, "coarse": axes, "fine": axes}
        return plan(study(methods=[method])).seconds - planning.START_S

    assert seconds(5) == pytest.approx(5 * seconds(1))


def test_the_plan_matches_the_run(tmp_path):
    """DP-FedGD's 0.1 is in both grids, so the fine stage adds only three trials."""
    planned = plan(study())
    ran = drive(tmp_path, study(), near(0.3))
    assert planned.cells == 2
    assert planned.packs == {"coarse": 1, "fine": 1, "confirm": 1}, "both methods have the same release"
    assert planned.trials == {"coarse": 3 + 4, "fine": 3 + 4, "confirm": 4}
    assert sum(planned.trials.values()) == len(ran.trials)
    assert planned.trial_rounds == sum(trial.rounds for trial in ran.trials) == 14 * 4 + 4 * 6


# ---- selection


@pytest.mark.parametrize(
    ("outcomes", "winner", "within"),
    [
        # accuracy first, then loss, then grid order; one standard error at 50% of 100 rows is 5
        ([("done", 50, 1.0), ("done", 60, 2.0), ("done", 55, 0.5)], "b", 1),
        ([("done", 60, 2.0), ("done", 60, 1.0), ("done", 60, 3.0)], "b", 3),
        ([("done", 50, 1.0), ("done", 60, 1.0), ("done", 60, 1.0)], "b", 2),
        ([("diverged", None, None), ("done", 10, 9.0), ("failed", None, None)], "b", 1),
        ([("stopped", None, None), ("done", 0, 9.0), ("diverged", None, None)], "b", 1),
        ([("done", 45, 1.0), ("done", 50, 1.0), ("done", 44.9, 1.0)], "b", 2),
    ],
)
def test_selection_rule(outcomes, winner, within):
    choice = choose(candidates_of("abc", 1), dict(zip("abc", outcomes, strict=True)), rows=100)
    assert (choice.key, choice.failed, choice.within_standard_error) == (winner, 0, within)


def test_no_winner_without_a_finished_trial():
    lost = {"a": ("diverged", None, None), "b": ("failed", None, None)}
    for seeds in (1, 2):
        assert choose(candidates_of("ab", seeds), lost, rows=100) is None
        assert win_contest(candidates_of("ab", seeds), lost) is None
    assert choose([], {}, rows=100) is None


def test_a_duplicate_trial_counts_once():
    choice = choose(candidates_of("aabba", 1), {"a": ("done", 50, 1.0), "b": ("done", 50, 1.0)}, rows=100)
    assert (choice.key, choice.within_standard_error) == ("a", 2)


def test_unfinished_trials_are_not_ranked():
    outcomes = {"a": ("stopped", 99.0, 0.1), "b": ("done", 1.0, 9.0), "c": ("done", 2.0, 9.0), "d": ("done", 2.0, 8.0)}
    assert [candidate.key for candidate in ranked(candidates_of("abcd", 1), outcomes)] == ["d", "c", "b"]


def test_ties_go_to_the_lower_loss_then_to_grid_order(tmp_path):
    def evaluate(trial):
        return "done", 50.0, {0.05: 0.7, 0.5: 0.7}.get(trial.hyperparameters["learning_rate"], 0.9)

    ran = drive(tmp_path, study(methods=[GD]), evaluate)
    assert rates(ran.of("DP-FedGD", "confirm")) == [0.05, 0.05]


def test_the_best_of_both_grids_is_confirmed(tmp_path):
    """The fine grid spans 0.05 to 0.5; the winner, 1, is in the coarse grid."""
    ran = drive(tmp_path, study(methods=[GD]), near(2))
    assert rates(ran.of("DP-FedGD", "confirm")) == [1.0, 1.0]


@pytest.mark.parametrize("best", [0.01, 0.1, 1.0])
def test_zoom_refines_around_the_coarse_winner(tmp_path, best):
    """Steps of half a decade, one decade to either side, also beyond the edge of the grid."""
    ran = drive(tmp_path, study(methods=[GD], search={"refine": "zoom"}), near(best * 1.1))
    space = study(methods=[GD]).methods[0].space()
    expected = [c["learning_rate"] for c in search_spaces.refine(space, "zoom", {"learning_rate": best})]
    assert rates(ran.of("DP-FedGD", "fine")) == expected
    assert expected == pytest.approx([best / 10, best / 10**0.5, best, best * 10**0.5, best * 10], rel=1e-3)
    assert len(ran.trials) == 3 + 5 + 2 - len({0.01, 0.1, 1.0} & set(expected))


ZOOM = {"refine": "zoom"}


def zooms(ran, title="DP-FedGD") -> list[list[float]]:
    """The learning rates of every zoom stage, for the first seed."""
    return [rates(ran.of(title, stage))[:: len(SEEDS["search"])] for stage in ("fine", "finer", "finest")]


def test_zoom_follows_a_winner_beyond_the_edge(tmp_path):
    """The grid ends at 1 and the best rate is 1000: the three zooms reach 10, 100 and 1000."""
    ran = drive(tmp_path, study(methods=[GD], seeds=SEEDS, search=ZOOM), near(1000))
    fine, finer, finest = zooms(ran)
    assert fine == pytest.approx([0.1, 10**-0.5, 1, 10**0.5, 10], rel=1e-3)
    assert finer == pytest.approx([10**0.75, 10**1.5, 100], rel=1e-3)
    assert finest == pytest.approx([10**1.75, 10**2.5, 1000], rel=1e-3)
    assert rates(ran.of("DP-FedGD", "confirm")) == [1000, 1000]


def test_zoom_narrows_while_the_neighbours_of_the_winner_differ(tmp_path):
    """`near` has no noise, so each zoom halves the step to either side."""
    ran = drive(tmp_path, study(methods=[GD], seeds=SEEDS, search=ZOOM), near(0.12))
    _, finer, finest = zooms(ran)
    assert finer == pytest.approx([10**-1.25, 10**-0.75], rel=1e-3)
    assert finest == pytest.approx([10**-1.125, 10**-0.875], rel=1e-3)
    assert rates(ran.of("DP-FedGD", "confirm")) == pytest.approx([10**-0.875] * 2, rel=1e-3)


def test_zoom_ends_when_the_neighbours_of_the_winner_are_as_good(tmp_path):
    """Seeds change every score by more than half a decade does."""
    seed_effect = {1: -20.0, 2: 0.0, 3: 20.0}

    def evaluate(trial):
        state, accuracy, loss = near(0.1)(trial)
        neighbour = trial.hyperparameters["learning_rate"] != 0.1
        return state, accuracy + (seed_effect.get(trial.seed, 0.0) if neighbour else 0.0), loss

    ran = drive(tmp_path, study(methods=[GD], seeds=SEEDS, search=ZOOM), evaluate)
    assert (cell_id(ran.study, "DP-FedGD", 8), "grid", "finer") not in ran.stages
    assert rates(ran.of("DP-FedGD", "confirm")) == [0.1, 0.1]


def test_zoom_continues_only_on_undecided_axes(tmp_path):
    """rho = 1 leads by -1, 0 and 4 over the seeds (within noise) and lies inside its axis: it is not refined."""
    method = {
        "name": "dp-fedsofim",
        "fixed": {"beta": 0.9},
        "coarse": {"learning_rate": [0.01, 0.1, 1], "rho": [0.1, 1, 10]},
        "fine": {"learning_rate": [0.1], "rho": [1]},
    }

    def evaluate(trial):
        state, accuracy, loss = near(0.12)(trial)
        return state, accuracy - (trial.hyperparameters["rho"] != 1) * {1: -1.0, 2: 0.0}.get(trial.seed, 4.0), loss

    ran = drive(tmp_path, study(methods=[method], seeds=SEEDS, search=ZOOM), evaluate)
    assert {trial.hyperparameters["rho"] for trial in ran.of("DP-FedSOFIM", "finer")} == {1.0}
    assert len(ran.of("DP-FedSOFIM", "finer")) == 2 * 3


# ---- several seeds and a contest


SEEDS = {"search": [1, 2, 3], "contest": [11, 12], "confirm": [42, 7]}


def near_with_bonus(best: float, bonus: dict[tuple[float, int], float]):
    """`near`, plus a bonus for some pairs of learning rate and seed."""

    def evaluate(trial):
        state, accuracy, loss = near(best)(trial)
        return state, accuracy + bonus.get((trial.hyperparameters["learning_rate"], trial.seed), 0.0), loss

    return evaluate


def test_a_configuration_is_ranked_by_its_mean_over_seeds(tmp_path):
    """0.01 has the best single trial (seed 2), but not the best mean over three seeds."""
    of = study(methods=[GD], seeds={**SEEDS, "contest": []})
    ran = drive(tmp_path, of, near_with_bonus(0.1, {(0.01, 2): 25.0}))
    assert [(t.hyperparameters["learning_rate"], t.seed) for t in ran.of("DP-FedGD", "coarse")][:4] == [
        *((0.01, 1), (0.01, 2), (0.01, 3)),
        (0.1, 1),
    ]
    assert rates(ran.of("DP-FedGD", "confirm")) == [0.1, 0.1]
    assert len(ran.trials) == 3 * (3 + 4 - 1) + 2


def test_finalists_are_compared_on_fresh_seeds(tmp_path):
    """A bonus on the search seeds puts 0.1 first. The contest has as many rounds as confirm, uses validation rows and
    ranks 0.5 first."""
    bonus = {(0.1, seed): 16.0 for seed in SEEDS["search"]}
    of = study(methods=[GD], seeds=SEEDS, search={"finalists": 3})
    ran = drive(tmp_path, of, near_with_bonus(0.5, bonus))
    contest = ran.of("DP-FedGD", "contest")
    assert [(t.hyperparameters["learning_rate"], t.seed) for t in contest] == [
        *((0.1, 11), (0.1, 12)),  # in the order of the search
        *((0.5, 11), (0.5, 12)),
        *((0.3, 11), (0.3, 12)),
    ]
    assert {trial.rounds for trial in contest} == {6}
    assert {(t.problem.train_on, t.problem.evaluate_on) for t in contest} == {("train", "validation")}
    assert rates(ran.of("DP-FedGD", "confirm")) == [0.5, 0.5]
    summary = status.read(tmp_path)
    assert summary["finished"]
    assert summary["cells"][0]["best_validation_accuracy"] == 90
    assert summary["cells"][0]["stages"]["contest"] == {"done": 6, "total": 6}


def test_status_names_the_winner_and_not_the_best_mean(tmp_path):
    """0.3 leads 0.1 in the contest by 10 and -8: a tie, which 0.1 wins by its smaller spread."""
    contest_scores = {(0.3, 11): 60.0, (0.3, 12): 42.0, (0.1, 11): 50.0, (0.1, 12): 50.0}

    def evaluate(trial):
        if trial.rounds == 6:
            return "done", contest_scores.get((trial.hyperparameters["learning_rate"], trial.seed), 20.0), 1.0
        return near(0.2)(trial)

    ran = drive(tmp_path, study(methods=[GD], seeds=SEEDS), evaluate)
    assert rates(ran.of("DP-FedGD", "confirm")) == [0.1, 0.1]
    (cell_status,) = status.read(tmp_path)["cells"]
    assert (cell_status["best_validation_accuracy"], cell_status["best_hyperparameters"]) == (
        50.0,
        {"learning_rate": 0.1},
    )


def test_a_configuration_enters_a_contest_once(tmp_path):
    """0.1 runs twice in the search: with 3 and with 4 rounds."""
    of = study(methods=[GD], seeds=SEEDS, rounds={"coarse": 3, "fine": 4, "confirm": 6})
    ran = drive(tmp_path, of, near(0.1))
    assert sorted(set(rates(ran.of("DP-FedGD", "contest")))) == [0.01, 0.05, 0.1, 0.3, 0.5, 1.0]
    assert len(ran.of("DP-FedGD", "contest")) == 6 * 2


def test_both_selection_rules_share_their_trials(tmp_path):
    """`single` uses only the first seed and confirms its best configuration."""
    bonus = {(0.01, 1): 15.0}
    of = study(methods=[GD], seeds=SEEDS, search={"select": ["contest", "single"]})
    ran = drive(tmp_path, of, near_with_bonus(0.1, bonus))
    assert rates(ran.of("DP-FedGD", "confirm")) == [0.1, 0.1]
    assert rates(ran.of("DP-FedGD", "confirm", "grid single")) == [0.01, 0.01]
    assert (cell_id(ran.study, "DP-FedGD", 8), "grid single", "contest") not in ran.stages
    assert {t.seed for t in ran.of("DP-FedGD", "coarse", "grid single")} == {1}
    assert len(ran.trials) == 3 * 6 + 2 * 6 + 2 + 2, "its search trials are a subset of the other's"
    assert set(ran.choices) == {cell("DP-FedGD"), f"{cell('DP-FedGD')} (grid single)"}
    assert status.read(tmp_path)["finished"]


def scored(*rows: tuple[float | None, ...]):
    """Candidates a, b, … with their scores for every seed (None: diverged)."""
    names = ["".join(pair) for pair in itertools.product("abcdefgh"[: len(rows)], "12345"[: len(rows[0])])]
    values = [value for row in rows for value in row]
    outcomes = {
        key: ("diverged", None, None) if value is None else ("done", value, 1.0)
        for key, value in zip(names, values, strict=True)
    }
    return candidates_of(names, len(rows[0])), outcomes


@pytest.mark.parametrize(
    ("rows", "winner", "tied"),
    [
        # b leads by 2, 2.1 and 1.9: no tie, regardless of the spreads
        ([(50, 51, 52), (52.0, 53.1, 53.9)], "b", 1),
        # b leads a by 1 on average, but by 4, -3 and 2, a standard error of 2.08: a tie, and a has the smaller spread
        ([(50, 50, 50), (54, 47, 52)], "a", 2),
        # equal spreads: the earlier candidate wins
        ([(50, 52, 51), (51, 50, 52)], "a", 2),
        # the best mean, but one seed diverged
        ([(90, 90, None), (50, 50, 50), (40, 40, 40)], "b", 1),
        # every candidate diverged on some seed: the one with the fewest divergences wins
        ([(90, None, None), (50, None, 50)], "b", 1),
        # one seed: as in a search, one standard error at 50% of 100 rows is 5
        ([(50.0,), (50.1,), (50.1,), (45.0,)], "b", 3),
    ],
)
def test_contest_rule(rows, winner, tied):
    choice = win_contest(*scored(*rows), rows=100)
    assert (choice.key[0], choice.within_standard_error) == (winner, tied)


def test_a_contest_without_a_preference_for_small_spreads_goes_to_the_best_mean():
    rows = (70.0, 74.0, 72.4), (71.9, 72.1, 72.0)
    assert win_contest(*scored(*rows)).key == "b1"
    assert win_contest(*scored(*rows), prefer_small_spread=False).key == "a1"


def test_the_smallest_error_wins_a_contest():
    assert win_contest(*scored((3.0, 3.1), (1.0, 1.1), (2.0, 2.1)), objective_of("squared_error")).key == "b1"


@given(st.lists(st.tuples(*[st.floats(0, 100)] * 3), min_size=1, max_size=6), st.randoms())
def test_the_winner_does_not_depend_on_the_order_of_results(rows, random):
    """A ledger filled in another order gives the same winner."""
    candidates, outcomes = scored(*rows)
    shuffled = list(outcomes.items())
    random.shuffle(shuffled)
    assert win_contest(candidates, dict(shuffled)) == win_contest(candidates, outcomes)


@given(st.lists(st.tuples(*[st.floats(0, 100)] * 3), min_size=1, max_size=6))
def test_the_winner_of_a_contest_is_within_one_standard_error_of_the_best(rows):
    candidates, outcomes = scored(*rows)
    choice = win_contest(candidates, outcomes)
    best = max(statistics.fmean(row) for row in rows)
    differences = [paired_difference(row, _scores(choice, outcomes)) for row in rows if statistics.fmean(row) == best]
    assert any(mean <= error for mean, error in differences)
    assert 1 <= choice.within_standard_error <= len(rows)


def _scores(choice, outcomes) -> list[float]:
    return [outcomes[key][1] for key in choice.candidate.keys]


# ---- partition seeds


@pytest.mark.parametrize(
    ("given", "search", "contest", "confirm"),
    [
        (9, {1: 9, 2: 9, 3: 9}, {11: 9, 12: 9}, {42: 9, 7: 9}),
        ("per-seed", {1: 1, 2: 2, 3: 3}, {11: 11, 12: 12}, {42: 42, 7: 7}),
        ([5, 6], {1: 5, 2: 6, 3: 5}, {11: 5, 12: 6}, {42: 5, 7: 6}),
    ],
)
def test_the_partition_seed_follows_from_the_trial_seed(tmp_path, given, search, contest, confirm):
    of = study(methods=[GD], seeds={**SEEDS, "partition": given})
    ran = drive(tmp_path, of, near(0.3))
    for stage, expected in (("coarse", search), ("fine", search), ("contest", contest), ("confirm", confirm)):
        assert {t.seed: t.problem.partition.seed for t in ran.of("DP-FedGD", stage)} == expected
    with Ledger.read(tmp_path) as ledger:
        tables = [path.name for path in write_tables(ledger, tmp_path)[0]]
    assert ("partitions.md" in tables) == (given != 9)
    partition_seed = read_best(tmp_path / "best.yaml")[cell("DP-FedGD")]["partition_seed"]
    assert partition_seed == (9 if given == 9 else confirm)


# ---- axes beyond a method's hyperparameters


def test_clip_and_rounds_can_be_searched(tmp_path):
    """The budget is fixed, so more rounds mean more noise per round. Confirm runs the winner's number of rounds."""
    axes = {"learning_rate": [0.1], "clip": [1, 10], "rounds": [2, 4]}
    of = study(methods=[{"name": "dp-fedgd", "coarse": axes, "fine": axes}], seeds=SEEDS)

    def evaluate(trial):
        return "done", 50.0 + trial.rounds - trial.privacy.clip, 1.0

    ran = drive(tmp_path, of, evaluate)
    coarse = ran.of("DP-FedGD", "coarse")[::3]
    assert [(t.privacy.clip, t.rounds) for t in coarse] == [(1, 2), (1, 4), (10, 2), (10, 4)]
    assert all(t.privacy.epsilon == 8 and "clip" not in t.hyperparameters for t in coarse)
    assert {(t.privacy.clip, t.rounds) for t in ran.of("DP-FedGD", "contest")} == {(1, 2), (1, 4), (10, 2), (10, 4)}
    assert [(t.privacy.clip, t.rounds) for t in ran.of("DP-FedGD", "confirm")] == [(1, 4), (1, 4)]
    noise = {t.rounds: plan_of(t, [100] * 4).noise_std["gradient"] for t in coarse[:2]}
    assert noise[4] == pytest.approx(noise[2] * 2**0.5, rel=1e-5)
    with Ledger.read(tmp_path) as ledger:
        (result,) = Results.read(ledger).cells
    assert result.search.chosen == {"learning_rate": 0.1, "clip": 1.0, "rounds": 4}
    assert (result.last, result.search.tried["clip"]) == (4, (1.0, 10.0))


def test_halving_needs_equal_rounds():
    axes = {"learning_rate": [0.1], "rounds": [2, 4]}
    with pytest.raises(ValueError, match="DP-FedGD tunes `rounds`, but halving compares configurations after equal"):
        study(methods=[{"name": "dp-fedgd", "coarse": axes}], search={"strategies": ["halving"]})


# ---- trials that diverge or fail


@pytest.mark.parametrize("state", ["diverged", "failed"])
def test_a_cell_without_a_winner_ends_without_confirm(tmp_path, state):
    def evaluate(trial):
        return near(0.3)(trial) if trial.method == "dp-fedsofim" else (state, None, None)

    ran = drive(tmp_path, study(), evaluate)
    assert ran.finished
    assert (cell_id(ran.study, "DP-FedGD", 8), "grid", "fine") not in ran.stages
    assert (cell_id(ran.study, "DP-FedGD", 8), "grid", "confirm") not in ran.stages
    assert ran.choices == {cell("DP-FedGD"): None, cell("DP-FedSOFIM"): ran.of("DP-FedSOFIM", "fine")[0].key}
    assert len(ran.of("DP-FedSOFIM", "confirm")) == 2
    summary = status.read(tmp_path)
    assert summary["finished"]
    assert summary["trials"] == {state: 3, "done": 4 + 4 + 2}
    again = drive(tmp_path, study(), evaluate).trials
    assert len(again) == (3 if state == "failed" else 0), "failures may be transient and are retried"


def test_failed_trials_are_retried_unless_a_later_stage_depends_on_them(tmp_path):
    """The first coarse trial fails and the fine stage is built without it, so the failure is final. No stage depends on
    a failed confirm trial, so it is retried and its row replaced."""
    first_keys = {}

    def evaluate(trial):
        first = first_keys.setdefault(trial.rounds, trial.key) == trial.key
        return ("failed", None, None) if first else near(0.3)(trial)

    ran = drive(tmp_path, study(methods=[GD]), evaluate)
    assert ran.finished
    again = drive(tmp_path, study(methods=[GD]), near(0.3))
    assert [trial.rounds for trial in again.trials] == [6]
    with Ledger.read(tmp_path) as ledger:
        states = Counter(state for state, _, _ in ledger.outcomes().values())
    assert states["failed"] == 1


@pytest.mark.parametrize("strategy", ["grid", "optuna"])
def test_failed_search_trials_are_final_once_the_winner_is_confirmed(tmp_path, strategy):
    """A failed fine or Optuna trial is not retried: it could replace the winner that was confirmed."""
    of = study(methods=[GD], search={"strategies": [strategy], "optuna": {"batch": 3}})

    def evaluate(trial):
        searched = trial.rounds == 4
        return ("failed", None, None) if searched and trial.hyperparameters["learning_rate"] < 0.09 else near(1)(trial)

    first = drive(tmp_path, of, evaluate)
    stages = ("fine",) if strategy == "grid" else ("optuna",)
    assert any(
        trial.hyperparameters["learning_rate"] < 0.09 for s in stages for trial in first.of("DP-FedGD", s, strategy)
    )
    assert drive(tmp_path, of, near(0.01)).trials == []


def test_failed_optuna_trials_are_not_retried_during_the_search(tmp_path):
    """Optuna's later proposals already depend on the failure."""
    of = study(methods=[GD], search=OPTUNA)
    failing = drive(tmp_path, of, lambda trial: ("failed", None, None), batch=3, stop_after=3)
    again = drive(tmp_path, of, near(0.3))
    assert not {trial.key for trial in failing.trials} & {trial.key for trial in again.trials}


def test_optuna_proposals_of_a_batch_take_each_other_into_account():
    """Running trials count as bad ones (constant liar); otherwise a batch would cluster around the best so far."""
    assert optuna_samplers.build("tpe", 1, {})._constant_liar


def test_optuna_optimises_in_the_direction_of_the_objective():
    """For an error, Optuna's best trial is the one with the smallest value."""
    for objective, best in (("accuracy", 2), ("loss", 0)):
        (only_cell,) = PreparedStudy.prepare(study(methods=[GD], objective=objective, search=OPTUNA)).cells
        outcomes = {}
        search = CellSearch(only_cell, only_cell.study.variants[0], outcomes, 10)
        stage, batch = search.next_stage()
        search.open(stage, batch)
        outcomes.update({trial.key: ("done", 10.0 + i, 1.0) for i, trial in enumerate(batch)})
        search.next_stage()
        assert search.history.memo["optuna"]._searcher._study.best_trial.number == best


def test_optuna_replays_its_batches_without_a_cache():
    """The next proposal depends only on the results: a history without a cache gives the same one."""
    (only_cell,) = PreparedStudy.prepare(study(methods=[GD], search=OPTUNA)).cells
    outcomes = {}
    search = CellSearch(only_cell, only_cell.study.variants[0], outcomes, 10)
    for _ in range(2):
        stage, batch = search.next_stage()
        search.open(stage, batch)
        outcomes.update({trial.key: ("done", 10.0 + i, 1.0) for i, trial in enumerate(batch)})
    search.history.memo.clear()
    proposal = Optuna().propose(search.task, search.history)
    assert proposal == Optuna().propose(search.task, dataclasses.replace(search.history, memo={}))
    assert proposal.configurations


def test_the_coarse_winner_is_confirmed_when_the_fine_grid_diverges(tmp_path):
    def evaluate(trial):
        coarse = trial.hyperparameters["learning_rate"] in (0.01, 0.1, 1)
        return near(0.3)(trial) if coarse else ("diverged", None, None)

    ran = drive(tmp_path, study(methods=[GD]), evaluate)
    assert rates(ran.of("DP-FedGD", "confirm")) == [0.1, 0.1]  # 0.3 is nearer to 0.1 than to 1, in decades


def test_a_cell_ends_even_if_its_confirm_trials_diverge(tmp_path):
    def evaluate(trial):
        return ("diverged", None, None) if trial.rounds == 6 else near(0.3)(trial)

    assert drive(tmp_path, study(), evaluate).finished
    assert status.read(tmp_path)["finished"]


# ---- warm starts from neighbouring budgets


def test_the_best_of_neighbouring_budgets_enter_the_contest(tmp_path):
    """Every budget has a different best rate; each contest has two finalists."""
    best = {1: 0.01, 2: 0.1, 4: 1}

    def evaluate(trial):
        return near(best[trial.privacy.epsilon])(trial)

    settings = {
        "methods": [{**GD, "fine": {"learning_rate": [0.01, 0.1, 1]}}],
        "defaults": "paper",
        "epsilons": [4, 1, 2],
        "seeds": {"search": [1], "contest": [11], "confirm": [21]},
    }

    def contests(warm: bool) -> dict[float, set[float]]:
        ran = drive(tmp_path / str(warm), study(**settings, search={"warm_start": warm, "finalists": 2}), evaluate)
        assert ran.finished
        return {eps: set(rates(ran.of("DP-FedGD", "contest", epsilon=eps))) for eps in best}

    assert contests(warm=False) == {1: {0.01, 0.1}, 2: {0.1, 0.01}, 4: {1, 0.1}}
    assert contests(warm=True) == {1: {0.01, 0.1}, 2: {0.1, 1}, 4: {1, 0.1}}


def test_the_leader_of_a_budget_precedes_candidates_of_neighbouring_budgets(tmp_path):
    of = study(
        methods=[GD],
        epsilons=[1, 2, 4],
        seeds={"search": [1], "contest": [11], "confirm": [21]},
        search={"warm_start": True, "finalists": 1},
    )
    ran = drive(tmp_path, of, lambda trial: near({1: 0.01, 2: 0.1, 4: 1}[trial.privacy.epsilon])(trial))
    assert [rates(ran.of("DP-FedGD", "contest", epsilon=eps)) for eps in (1, 2, 4)] == [[0.01], [0.1], [1.0]]


def test_a_failed_trial_is_final_once_the_contest_of_a_neighbouring_budget_depends_on_it(tmp_path):
    """Its own cell has no contest yet. If retried, the trial might win and change the recorded contest."""
    of = study(
        methods=[{"name": "dp-fedgd", "coarse": {"learning_rate": [0.01, 0.1]}, "fine": {"learning_rate": [1]}}],
        epsilons=[1, 2, 4],
        seeds={"search": [1], "contest": [11], "confirm": [21]},
        search={"warm_start": True, "finalists": 2},
    )

    def evaluate(trial):
        if trial.privacy.epsilon == 2 and trial.hyperparameters["learning_rate"] == 1 and not retrying:
            return "failed", None, None
        return near(0.01 if trial.privacy.epsilon == 1 else 1)(trial)

    retrying = False
    with Ledger.write(tmp_path) as ledger:
        ledger.add_study(of.model_dump_json(), "by hand")
        sweep = Sweep(PreparedStudy.prepare(of), ledger)
        while not any(key[2] == "contest" for key in ledger.stages()):
            early = [trial for trial in sweep.waiting.values() if trial.privacy.epsilon < 4]
            rows = [row(trial, evaluate(trial)) for trial in early[:1]]
            ledger.add(rows)
            sweep.ended({r.key: (r.state, r.accuracy, r.loss) for r in rows})
    retrying = True
    assert drive(tmp_path, of, evaluate).finished


def test_a_new_budget_is_refused_when_warm_starts_would_change_finished_contests(tmp_path):
    old, new = (study(epsilons=e, seeds={"contest": [11]}, search={"warm_start": True}) for e in ([1], [1, 2]))
    with pytest.raises(UserError, match=r"epsilons = \[1.0, 2.0\]: with search.warm_start .* depend on \[1.0\]"):
        check_extension(old, new)


def test_settings_that_rule_out_warm_starts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="warm_start brings more finalists to a contest, and there is none"):
        study(search={"warm_start": True, "select": "single"})
    with pytest.raises(UserError, match=r"shard = 2/3: with search.warm_start"):
        study_run.run(study(search={"warm_start": True}), "", tmp_path, View(), shard=(2, 3))


# ---- interrupted and resumed


STRATEGIES = {
    "table": {},
    "zoom": {"search": {"refine": "zoom"}},
    "zoom, several seeds": {"methods": [GD], "seeds": {"search": [1, 2], "contest": [3]}, "search": {"refine": "zoom"}},
    "both": {"search": {"strategies": ["grid", "optuna"], "optuna": {"batch": 3}}},
    "random": {"methods": [GD], "search": {"strategies": ["random"]}},
    "halving": {"methods": [GD], "search": {"strategies": ["halving"], "trials": 4}},
    "halving, several seeds": {
        "methods": [GD],
        "seeds": {"search": [1, 2], "contest": [11]},
        "search": {"strategies": ["halving"], "trials": 3, "halving": {"rungs": 2, "keep": 0.5}},
    },
    "contest": {"methods": [GD], "seeds": {"search": [1, 2], "contest": [11, 12]}},
    "warm": {
        "methods": [GD],
        "defaults": "paper",
        "epsilons": [1, 2, 4],
        "seeds": {"search": [1, 2], "contest": [11]},
        "search": {"warm_start": True, "finalists": 2},
    },
    "both selections, optuna": {
        "methods": [GD],
        "seeds": {"search": [1, 2], "contest": [11]},
        "search": {"strategies": ["optuna"], "select": ["contest", "single"], "optuna": {"batch": 4}},
    },
}


def sometimes_diverging(trial: TrialSpec):
    """Depends on the whole configuration and on nothing else."""
    if trial.hyperparameters["learning_rate"] > 0.9 and trial.rounds == 4:
        return "diverged", None, None
    state, accuracy, _ = near(0.2)(trial)
    return state, accuracy, trial.hyperparameters.get("rho", 1.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sweep_interrupted_anywhere_resumes_identically(tmp_path, strategy):
    of = study(**STRATEGIES[strategy])
    whole = drive(tmp_path / "whole", of, sometimes_diverging)
    assert whole.finished
    for cut in range(1, len(whole.trials)):
        folder = tmp_path / str(cut)
        first = drive(folder, of, sometimes_diverging, stop_after=cut)
        assert not first.finished
        second = drive(folder, of, sometimes_diverging)
        assert second.finished
        assert second.stages == whole.stages
        assert second.choices == whole.choices
        assert Counter(t.key for t in first.trials + second.trials) == Counter(t.key for t in whole.trials)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_has_the_key_of_its_trial(tmp_path, strategy):
    """The key hashes everything that can change the result, so a trial read back must have the same key."""
    drive(tmp_path, study(**STRATEGIES[strategy]), sometimes_diverging)
    with Ledger.read(tmp_path) as ledger:
        for key, ledger_row in ledger.rows(ledger.outcomes()).items():
            assert ledger_row.trial.key == key


def test_a_finished_sweep_has_nothing_to_run(tmp_path):
    drive(tmp_path, study(), near(0.3))
    before = (tmp_path / "ledger.sqlite").read_bytes()
    with Ledger.write(tmp_path) as ledger:
        sweep = Sweep(PreparedStudy.prepare(study()), ledger)
        assert sweep.finished
        assert sweep.waiting == {}
    assert (tmp_path / "ledger.sqlite").read_bytes() == before, "nothing is written"


class DyingLedger:
    """A ledger whose process dies at its n-th write, before or after the write reaches the disk."""

    def __init__(self, ledger: Ledger, writes: int, after: bool) -> None:
        self._ledger, self._writes, self._after = ledger, writes, after

    def __getattr__(self, name):
        attribute = getattr(self._ledger, name)
        if not name.startswith("add"):
            return attribute

        def write(*arguments, **named):
            self._writes -= 1
            if self._writes == 0 and not self._after:
                raise KeyboardInterrupt
            attribute(*arguments, **named)
            if self._writes == 0:
                raise KeyboardInterrupt

        return write


@pytest.mark.parametrize("after", [False, True])
def test_a_driver_can_die_at_any_write(tmp_path, after):
    of = study(search={"strategies": ["grid", "optuna"], "optuna": {"batch": 4}})
    prepared = PreparedStudy.prepare(of)
    whole = drive(tmp_path / "whole", of, sometimes_diverging)
    for writes in itertools.count(1):
        folder = tmp_path / str(writes)
        with Ledger.write(folder) as ledger:
            dying = DyingLedger(ledger, writes, after)
            try:
                sweep = Sweep(prepared, dying)
                while not sweep.finished:
                    rows = [row(trial, sometimes_diverging(trial)) for trial in list(sweep.waiting.values())[:5]]
                    dying.add(rows)
                    sweep.ended({r.key: (r.state, r.accuracy, r.loss) for r in rows})
            except KeyboardInterrupt:
                pass
            else:
                assert writes > 15, "the driver must have died at least 15 times"
                return
        second = drive(folder, of, sometimes_diverging)
        assert second.stages == whole.stages
        assert second.choices == whole.choices


# ---- extending a study


def test_new_confirm_seeds_run_only_their_own_trials(tmp_path):
    drive(tmp_path, study(), near(0.3))
    ran = drive(tmp_path, study(seeds={"confirm": [42, 7, 1, 2]}), near(0.3))
    assert ran.finished
    assert [(trial.method, trial.rounds, trial.seed) for trial in ran.trials] == [
        ("dp-fedgd", 6, 1),
        ("dp-fedgd", 6, 2),
        ("dp-fedsofim", 6, 1),
        ("dp-fedsofim", 6, 2),
    ]
    assert len(ran.stages[cell_id(study(), "DP-FedGD", 8), "grid", "confirm"]) == 4


def test_new_budgets_methods_and_partitions_run_only_their_own_trials(tmp_path):
    drive(tmp_path, study(methods=[GD]), near(0.3))
    ran = drive(tmp_path, study(methods=[GD], epsilons=[8, 2]), near(0.3))
    assert {trial.privacy.epsilon for trial in ran.trials} == {2}
    assert len(ran.trials) == 8
    ran = drive(tmp_path, study(methods=[SOFIM, GD], epsilons=[8, 2]), near(0.3))
    assert {trial.method for trial in ran.trials} == {"dp-fedsofim"}
    ran = drive(tmp_path, study(methods=[SOFIM, GD], epsilons=[8, 2], partitions=["iid", "dirichlet:1"]), near(0.3))
    assert {trial.problem.partition.kind for trial in ran.trials} == {"dirichlet"}
    assert status.read(tmp_path)["finished"]
    assert status.read(tmp_path)["cells_ended"] == 2 * 2 * 2


def test_a_second_strategy_runs_only_its_own_trials(tmp_path):
    first = drive(tmp_path, study(methods=[GD]), near(0.3))
    second = drive(tmp_path, study(methods=[GD], search={"strategies": ["grid", "optuna"]}), near(0.3))
    assert {key for key in second.stages if key not in first.stages} == {
        (cell_id(study(), "DP-FedGD", 8), "optuna", "optuna"),
        (cell_id(study(), "DP-FedGD", 8), "optuna", "confirm"),
    }
    keys = second.stages[cell_id(study(), "DP-FedGD", 8), "optuna", "optuna"]
    assert {trial.key for trial in second.trials if trial.rounds == 4} == set(keys)


def test_status_of_an_interrupted_sweep(tmp_path):
    drive(tmp_path, study(), near(0.3), stop_after=5, batch=1)
    summary = status.read(tmp_path)
    assert not summary["finished"]
    assert summary["running"] is None
    assert (summary["cells_ended"], summary["cells_total"]) == (0, 2)
    assert summary["trials"] == {"done": 5}
    gd = next(entry for entry in summary["cells"] if entry["cell"] == cell("DP-FedGD"))
    assert gd["stages"] == {"coarse": {"done": 3, "total": 3}, "fine": {"done": 1, "total": 4}}
    assert gd["best_validation_accuracy"] == pytest.approx(90 - 10 * math.log10(3))  # 0.1 and 0.3
    assert "not finished, 0 of 2 cells ended" in status.as_text(summary)


@pytest.mark.parametrize(
    ("strategy", "state", "ended"),
    [
        ("grid", "done", False),  # the fine stage is not open yet
        ("grid", "diverged", True),  # nothing to refine
        ("optuna", "done", False),
        ("optuna", "diverged", False),  # three of seven: the next batch is not proposed yet
    ],
)
def test_status_after_a_driver_died_between_a_result_and_the_next_stage(tmp_path, strategy, state, ended):
    of = study(methods=[GD], search={"strategies": [strategy], "optuna": {"batch": 3}})
    drive(tmp_path, of, near(0.3), stop_after=0)
    with Ledger.write(tmp_path) as ledger:
        waiting = Sweep(PreparedStudy.prepare(of), ledger).waiting.values()
        ledger.add([row(trial, near(0.3)(trial) if state == "done" else (state, None, None)) for trial in waiting])
    summary = status.read(tmp_path)
    assert (summary["finished"], summary["cells_ended"]) == (ended, int(ended))


# ---- optuna


OPTUNA = {"strategies": ["optuna"], "optuna": {"batch": 3}}


def test_optuna_has_the_budget_of_the_grids(tmp_path):
    """3 + 4 and 4 + 4 trials; a configuration in both grids counts twice."""
    ran = drive(tmp_path, study(search=OPTUNA), near(0.3))
    assert len(ran.of("DP-FedGD", "optuna", "optuna")) == 7
    assert len(ran.of("DP-FedSOFIM", "optuna", "optuna")) == 8
    assert ran.finished


def test_optuna_proposes_in_batches(tmp_path):
    """The next three are proposed once the results of the last three are known."""
    with Ledger.write(tmp_path) as ledger:
        sweep = Sweep(PreparedStudy.prepare(study(methods=[GD], search=OPTUNA)), ledger)
        sizes = []
        while not sweep.finished:
            batch = list(sweep.waiting.values())
            sizes.append(len(batch))
            first, *rest = batch
            sweep.ended({first.key: near(0.3)(first)})
            assert list(sweep.waiting.values()) == rest or not rest
            sweep.ended({trial.key: near(0.3)(trial) for trial in rest})
    assert sizes == [3, 3, 1, 2], "seven trials in batches of three, then the two confirm seeds"


def test_optuna_is_deterministic_and_depends_on_its_seed(tmp_path):
    runs = [drive(tmp_path / name, study(search=OPTUNA), near(0.3)) for name in "ab"]
    assert runs[0].stages == runs[1].stages
    other = drive(tmp_path / "c", study(search={**OPTUNA, "optuna": {"batch": 3, "seed": 1}}), near(0.3))
    assert other.stages != runs[0].stages


def test_optuna_learns_from_results(tmp_path):
    """The first ten trials are random and do not depend on results; the last ones lie near the best rate."""
    method = {
        "name": "dp-fedgd",
        "coarse": {"learning_rate": [1e-4, 10]},
        "fine": {"learning_rate": [0.1 + 0.001 * k for k in range(40)]},
    }
    proposed = {}
    for best in (0.003, 3):
        ran = drive(tmp_path / str(best), study(methods=[method], search=OPTUNA), near(best))
        proposed[best] = rates(ran.of("DP-FedGD", "optuna", "optuna"))
        assert len(proposed[best]) == 42
    assert proposed[0.003][:9] == proposed[3][:9]
    assert statistics.median(proposed[0.003][-20:]) < 0.05 < statistics.median(proposed[3][-20:])


def test_optuna_stays_within_the_axes(tmp_path):
    """Values lie between the minimum and maximum of both grids; integers stay integers, categories and fixed values are
    unchanged."""
    methods = [
        {
            "name": "dp-fedsofim",
            "fixed": {"weight_decay": 0.25},
            "coarse": {
                "learning_rate": [0.1, 1],
                "rho": [1, 2],
                "beta": [0.5, 0.99],
                "direction": ["momentum", "gradient"],
            },
            "fine": {"learning_rate": [2], "rho": [1.5], "beta": [0.999], "direction": ["momentum"]},
        },
        {
            "name": "dp-fedavg",
            "coarse": {"server_learning_rate": [0.1, 1], "local_steps": [1, 3, 5]},
            "fine": {"server_learning_rate": [0.5, 1], "local_steps": [2, 7]},
        },
    ]
    ran = drive(tmp_path, study(methods=methods, search=OPTUNA), lambda trial: ("done", 50.0, 1.0))
    sofim = [trial.hyperparameters for trial in ran.of("DP-FedSOFIM", "optuna", "optuna")]
    assert len(sofim) == 16 + 1
    assert all(0.1 <= h["learning_rate"] <= 2 and 1 <= h["rho"] <= 2 and 0.5 <= h["beta"] <= 0.999 for h in sofim)
    assert {h["direction"] for h in sofim} == {"momentum", "gradient"}
    assert {h["weight_decay"] for h in sofim} == {0.25}
    steps = [trial.hyperparameters["local_steps"] for trial in ran.of("DP-FedAvg", "optuna", "optuna")]
    assert len(steps) == 6 + 4
    assert all(type(step) is int and 1 <= step <= 7 for step in steps)


def test_optuna_supports_a_log_axis_that_includes_zero(tmp_path):
    """mu0 has a logarithmic scale and may be 0."""
    method = {
        "name": "dp-adafedprox",
        "fixed": {"local_steps": 1, "client_learning_rate": 0.1, "server_learning_rate": 1},
        "coarse": {"mu0": [0, 0.1]},
        "fine": {"mu0": [1]},
    }
    ran = drive(tmp_path, study(methods=[method], search=OPTUNA), lambda trial: ("done", 50.0, 1.0))
    assert ran.finished


def test_a_configuration_that_optuna_repeats_runs_once(tmp_path):
    """One axis of two integers: four proposals, at most two of them distinct."""
    method = {
        "name": "dp-fedavg",
        "fixed": {"server_learning_rate": 1},
        "coarse": {"local_steps": [1, 2]},
        "fine": {"local_steps": [1, 2]},
    }
    ran = drive(tmp_path, study(methods=[method], search=OPTUNA), lambda trial: ("done", 50.0, 1.0))
    assert ran.finished
    assert len(ran.of("DP-FedAvg", "optuna", "optuna")) == 4
    assert len({trial.key for trial in ran.trials}) == len(ran.trials) <= 2 + 2


def test_optuna_receives_the_mean_over_seeds(tmp_path):
    """Scores that differ by seed but have the same mean give the same proposals."""
    of = study(methods=[GD], seeds=SEEDS, search={**OPTUNA, "trials": 15})
    seed_effect = {1: 5.0, 2: -5.0}

    def unequal(trial):
        state, accuracy, loss = near(0.3)(trial)
        return state, accuracy + seed_effect.get(trial.seed, 0.0), loss

    equal_seeds, unequal_seeds = drive(tmp_path / "a", of, near(0.3)), drive(tmp_path / "b", of, unequal)
    assert equal_seeds.stages == unequal_seeds.stages
    assert len(equal_seeds.of("DP-FedGD", "optuna", "optuna")) == 15 * 3


def test_the_number_of_configurations_can_be_set(tmp_path):
    for strategy in ("optuna", "random"):
        ran = drive(tmp_path / strategy, study(methods=[GD], search={"strategies": [strategy], "trials": 5}), near(0.3))
        assert len(ran.of("DP-FedGD", strategy, strategy)) == 5
        assert status.read(tmp_path / strategy)["finished"]


def test_a_random_search_draws_from_its_seed_and_ignores_results(tmp_path):
    random = {"strategies": ["random"], "trials": 20}
    of = study(methods=[GD], search=random)
    runs = [drive(tmp_path / name, of, near(best)) for name, best in (("a", 1), ("b", 0.01))]
    drawn = [rates(ran.of("DP-FedGD", "random", "random")) for ran in runs]
    assert drawn[0] == drawn[1], "results do not change the draws"
    assert all(0.01 <= rate <= 1 for rate in drawn[0])
    assert 5 <= sum(rate < 0.1 for rate in drawn[0]) <= 15, "about half in each decade: the scale is logarithmic"
    other = drive(tmp_path / "c", study(methods=[GD], search={**random, "random": {"seed": 1}}), near(1))
    assert rates(other.of("DP-FedGD", "random", "random")) != drawn[0]


def test_optuna_continues_after_divergence(tmp_path):
    ran = drive(tmp_path, study(methods=[GD], search=OPTUNA), lambda trial: ("diverged", None, None))
    assert ran.finished
    assert len(ran.trials) == 7
    assert ran.choices == {cell("DP-FedGD"): None}
    assert status.read(tmp_path)["finished"]


# ---- successive halving

HALVING = {"strategies": ["halving"], "trials": 9}
RUNG = ("rung-1", "rung-2", "rung-3")


def rung_trials(ran, *rungs: str) -> list[list[TrialSpec]]:
    return [ran.of("DP-FedGD", rung, "halving") for rung in rungs or RUNG]


def test_the_best_of_a_rung_run_three_times_as_long_in_the_next(tmp_path):
    ran = drive(tmp_path, study(methods=[GD], rounds={"fine": 90, "confirm": 90}, search=HALVING), near(0.3))
    rungs = rung_trials(ran)
    assert [len(rung) for rung in rungs] == [27, 9, 3]
    assert [{trial.last_round for trial in rung} for rung in rungs] == [{10}, {30}, {90}]
    assert sum(trial.last_round for rung in rungs for trial in rung) == 9 * 90, "the cost of nine full trials"
    assert {trial.rounds for rung in rungs for trial in rung} == {90}, (
        "noise is calibrated for the full number of rounds"
    )
    distances = [
        sorted(abs(math.log(trial.hyperparameters["learning_rate"] / 0.3)) for trial in rung) for rung in rungs
    ]
    assert distances[1:] == [distances[0][:9], distances[0][:3]]
    (winner,) = {trial.hyperparameters["learning_rate"] for trial in ran.of("DP-FedGD", "confirm", "halving")}
    assert abs(math.log(winner / 0.3)) == distances[0][0]
    assert status.read(tmp_path)["finished"]


@pytest.mark.parametrize(
    ("rungs", "keep", "trials", "sizes"), [(2, 0.5, 5, [5, 3]), (2, 0.3, 5, [8, 3]), (5, 0.5, 3, [9, 5, 3, 2, 1])]
)
def test_rung_sizes_are_rounded_up(rungs, keep, trials, sizes):
    """0.3 of 8 is 2.4, so three continue; half of nine is 4.5, so five continue."""
    assert HalvingSettings(rungs=rungs, keep=keep).sizes(trials, 1000) == sizes


@pytest.mark.parametrize("last", [1, 2, 7, 70, 90])
def test_halving_stays_within_its_budget(last):
    halving = HalvingSettings()
    rounds, sizes = halving.rounds(last), halving.sizes(40, last)
    assert rounds[-1] == last
    assert rounds == sorted(rounds)
    assert sum(n * t for n, t in zip(sizes, rounds, strict=True)) <= 40 * last + 2 * last, (
        "two rung sizes may be rounded up"
    )


def test_rungs_rank_by_the_mean_over_seeds_and_diverged_candidates_come_last(tmp_path):
    """The largest rate is best on one seed only; the second largest diverges on one seed."""
    of = study(methods=[GD], seeds={"search": [1, 2]}, search={**HALVING, "halving": {"rungs": 2, "keep": 0.5}})
    rates_drawn = sorted({t.hyperparameters["learning_rate"] for t in first_rung(of)})

    def evaluate(trial):
        rate = trial.hyperparameters["learning_rate"]
        if rate == rates_drawn[-1] and trial.stop_after:
            return "done", 99.0 if trial.seed == 1 else 0.0, 1.0
        if rate == rates_drawn[-2] and trial.seed == 2:
            return "diverged", None, None
        return "done", 60.0 + rate, 1.0

    ran = drive(tmp_path, of, evaluate)
    first, second = (sorted({t.hyperparameters["learning_rate"] for t in rung}) for rung in rung_trials(ran, *RUNG[:2]))
    assert first == rates_drawn
    survivors = math.ceil(len(first) / 2)
    assert second == first[-2 - survivors : -2]


def first_rung(of) -> list[TrialSpec]:
    (only_cell,) = PreparedStudy.prepare(of).cells
    return CellSearch(only_cell, of.variants[0], {}, 10).next_stage()[1]


@pytest.mark.parametrize("given", [{"fixed": {"rounds": 90}}, {"rounds": 90}])
def test_rungs_are_fractions_of_the_method_s_rounds(tmp_path, given):
    of = study(methods=[{**GD, **given}], search=HALVING)
    ran = drive(tmp_path, of, near(0.3))
    assert [{trial.last_round for trial in rung} for rung in rung_trials(ran)] == [{10}, {30}, {90}]
    assert [len(rung) for rung in rung_trials(ran)] == [27, 9, 3]


def test_tables_and_exports_distinguish_rungs(tmp_path):
    """The smallest rates lead on the early rungs, the largest after all rounds."""

    def evaluate(trial):
        rate = trial.hyperparameters["learning_rate"]
        return "done", 90 - 10 * rate if trial.stop_after else 50 + 10 * rate, 1.0

    of = study(methods=[GD], rounds={"fine": 90, "confirm": 90}, search=HALVING)
    ran = drive(tmp_path, of, evaluate)
    last = rates(rung_trials(ran, "rung-3")[0])
    with Ledger.read(tmp_path) as ledger:
        (result,) = Results.read(ledger).cells
        (page,) = gather(ledger, "x")["cells"]
        export(ledger, "optuna", tmp_path / "optuna")
    assert result.search.chosen["learning_rate"] == result.search.by_one_seed["learning_rate"] == max(last)
    assert (result.search.found_in, result.search.configurations) == (("rung-3",), 27)
    assert (result.search.trials, result.search.trial_rounds) == (27 + 9 + 3, 27 * 10 + 9 * 20 + 3 * 60)
    search = page["search"]
    winner = search["winner"]
    assert search["stages"][winner] == ["rung-3"]
    assert (search["mean"][winner], search["seeds"][winner]) == (pytest.approx(50 + 10 * max(last), rel=1e-5), 1)
    (name,) = optuna.get_all_study_names(storage := f"sqlite:///{tmp_path / 'optuna' / 'optuna.db'}")
    trials = optuna.load_study(study_name=name, storage=storage).trials
    assert Counter(trial.state.name for trial in trials) == {"PRUNED": 27 + 9, "COMPLETE": 3}


def test_the_previous_rung_leads_until_a_rung_has_results(tmp_path):
    of = study(methods=[GD], search=HALVING)
    first = first_rung(of)
    drive(tmp_path, of, near(0.3), stop_after=len(first))
    (cell_status,) = status.read(tmp_path)["cells"]
    assert cell_status["stages"]["rung-2"]["done"] == 0
    assert cell_status["best_validation_accuracy"] is not None
    with Ledger.read(tmp_path) as ledger:
        (result,) = Results.read(ledger).cells
    assert result.search.found_in == ("rung-1",)


def test_finalists_come_from_the_last_rung(tmp_path):
    of = study(methods=[GD], seeds={"search": [1, 2], "contest": [11, 12]}, search={**HALVING, "finalists": 8})
    ran = drive(tmp_path, of, near(0.3))
    finalists = {t.hyperparameters["learning_rate"] for t in ran.of("DP-FedGD", "contest", "halving")}
    assert finalists == {t.hyperparameters["learning_rate"] for t in rung_trials(ran, "rung-3")[0]}


def test_halving_ends_when_every_trial_diverged(tmp_path):
    ran = drive(tmp_path, study(methods=[GD], search=HALVING), lambda trial: ("diverged", None, None))
    assert ran.finished
    assert [bool(rung) for rung in rung_trials(ran)] == [True, False, False]
    assert ran.choices == {cell("DP-FedGD"): None}
    assert status.read(tmp_path)["finished"]


def test_the_running_best_is_that_of_the_latest_rung(tmp_path):
    """Scores of different rungs are not comparable: an earlier rung's score does not count."""
    running_best = RunningBest(ACCURACY, [*RUNG, "contest"])
    for stage, score in (("rung-1", 80.0), ("rung-2", 60.0), ("rung-2", 50.0)):
        running_best.add(stage, int(score), 1, ("done", score, 1.0))
    assert running_best.score == 60.0


# ---- regret of a search


def test_the_error_of_a_difference_between_strategies_counts_repetitions_seeds_and_rows():
    """Both always choose the same configurations, which differ in one of 100 rows on every seed."""
    ours, theirs = np.full(100, 50.0), np.full(100, 50.0)
    theirs[0] = 100.0
    (one, other) = (regrets.Evaluated([float(rows.mean())] * 4, rows) for rows in (ours, theirs))
    found = regrets.difference(dict.fromkeys(range(6), other), dict.fromkeys(range(1, 7), one))  # 0 and 6 have no pair
    assert found["mean"] == pytest.approx(0.5)
    assert (found["repetitions"], found["seeds"]) == (0, 0)
    assert found["error"] == found["rows"] == pytest.approx(0.5)


def test_regret_is_measured_against_the_best_evaluated_configuration(tmp_path, capsys):
    """Three learning rates, one of them far too small: both selection rules choose, and no regret is negative."""
    space = {"coarse": {"learning_rate": [1e-6, 0.1, 1]}, "fine": {"learning_rate": [0.1]}}
    regret.main(
        [
            *("--data", "synthetic-frozen:300,200,6,3", "--clients", "3", "--partition", "iid"),
            *("--methods", "dp-fedgd", "--epsilons", "40", "--refine", "table", "--space", json.dumps(space)),
            *("--repetitions", "2", "--search-seeds", "2", "--contest-seeds", "2", "--evaluation-seeds", "2"),
            *("--json", str(tmp_path / "regret.json")),
        ]
    )
    (result,) = json.loads((tmp_path / "regret.json").read_text())
    assert result["evaluated"] == 3
    assert set(result["strategies"]) == {"grid", "grid single"}
    assert result["best"]["configuration"]["learning_rate"] in (0.1, 1.0)
    # three configurations, one of them in both grids; one or two search seeds; two contest seeds of 70 rounds
    assert result["strategies"]["grid single"]["trial_rounds"] == 3 * 50
    assert result["strategies"]["grid"]["trial_rounds"] == 2 * 3 * 50 + 3 * 2 * 70
    for strategy in result["strategies"].values():
        assert 0 <= strategy["mean"] <= strategy["p95"] <= strategy["worst"] < result["best"]["mean"]
    assert "| synthetic-frozen:300,200,6,3, dp-fedgd, 40 |" in capsys.readouterr().out


# ---- planning


def test_a_plan_for_a_cluster():
    """One federation per node, or per GPU where there are GPUs."""
    one, two = (plan(study(), [{"CPU": 4.0}] * count) for count in (1, 2))
    assert (one.federations, two.federations, two.where) == (1, 2, "a cluster of 2 nodes")
    gpus = plan(study(resources={"gpus_per_host": 1}), [{"CPU": 16.0, "GPU": 8.0}] * 8)
    assert (gpus.federations, gpus.device) == (64, "cuda")
    assert "on a cluster of 8 nodes: 64 federation(s) of 1 client host(s) on GPUs, about" in gpus.as_text()


def test_planning_cost_is_linear_in_the_number_of_trials(monkeypatch):
    """Each trial is constructed at most a few times."""
    constructed = []
    original = Cell.trials
    monkeypatch.setattr(Cell, "trials", lambda *args, **kwargs: (constructed.append(1), original(*args, **kwargs))[1])
    axes = {"learning_rate": [0.001 * (k + 1) for k in range(100)], "rho": [1 + k for k in range(10)], "beta": [0.9]}
    method = {"name": "dp-fedsofim", "coarse": axes, "fine": {**axes, "rho": [21 + k for k in range(10)]}}
    planned = plan(study(methods=[method]))
    assert planned.trials == {"coarse": 1000, "fine": 1000, "confirm": 2}
    assert len(constructed) < 4 * 2002
