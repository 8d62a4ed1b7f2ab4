"""The search without Ray: which stages open when, who wins, and that it can be cut off anywhere and go on the same.

Trials are "run" by a pure function of their configuration, so every winner can be named beforehand.
"""

import dataclasses
import itertools
import json
import math
import statistics
from collections import Counter

import optuna
import pytest
from handmade_ledgers import cell_id
from hypothesis import given
from hypothesis import strategies as st
from simulated_search import DATA, GD, SOFIM, cell, drive, near, row, study

import search_spaces
from benchmarks import regret
from orchestrator.execution import planning, study_run
from orchestrator.execution.cell_search import CellSearch
from orchestrator.execution.planning import plan
from orchestrator.execution.progress import View
from orchestrator.execution.sweep import Sweep
from orchestrator.report.export import export
from orchestrator.report.html.data import gather
from orchestrator.report.tables import write_tables
from orchestrator.report.tables.best import read_best
from orchestrator.results import status
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results
from orchestrator.search.candidates import candidates_of, paired_difference
from orchestrator.search.objective import ACCURACY, SQUARED_ERROR
from orchestrator.search.running_best import RunningBest
from orchestrator.search.selection import choose, ranked, win_contest
from orchestrator.search.strategies.halving import HalvingSettings
from orchestrator.search.strategies.optuna import Optuna, _Sampler
from orchestrator.study.cells import Blueprint, Cell
from orchestrator.study.extension import check_extension
from trainables.errors import UserError
from trainables.federation.pack import plan_of
from trainables.federation.trial_spec import TrialSpec


def rates(trials: list[TrialSpec]) -> list[float]:
    return [trial.hyperparameters["learning_rate"] for trial in trials]


# ---- stages


def test_stages_open_one_after_the_other(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        sweep = Sweep(Blueprint.draw(study(methods=[GD])), ledger)

        def end_all() -> list[TrialSpec]:
            ended = list(sweep.waiting.values())
            sweep.ended({trial.key: near(0.3)(trial) for trial in ended})
            return ended

        coarse = end_all()
        assert rates(coarse) == [0.01, 0.1, 1.0]
        fine = end_all()
        assert rates(fine) == [0.05, 0.3, 0.5], "0.1 has been run"
        assert not sweep.finished
        confirm = end_all()
        assert [(rate, trial.seed) for rate, trial in zip(rates(confirm), confirm, strict=True)] == [
            (0.3, 42),
            (0.3, 7),
        ]
        assert sweep.finished
        assert not sweep.waiting


def test_what_the_trials_of_a_stage_are(tmp_path):
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
    assert len(on_test) == 4, "test data is for the confirm stage alone"


def test_a_cell_does_not_wait_for_the_others(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        sweep = Sweep(Blueprint.draw(study()), ledger)
        gd = [trial for trial in sweep.waiting.values() if trial.method == "dp-fedgd"]
        sweep.ended({trial.key: near(0.3)(trial) for trial in gd})
        assert Counter(trial.method for trial in sweep.waiting.values()) == {"dp-fedsofim": 4, "dp-fedgd": 3}


def test_a_configuration_in_both_grids_is_run_once(tmp_path):
    ran = drive(tmp_path, study(methods=[GD]), near(0.3))
    assert rates(ran.of("DP-FedGD", "coarse")) == [0.01, 0.1, 1.0]
    assert rates(ran.of("DP-FedGD", "fine")) == [0.05, 0.1, 0.3, 0.5]
    assert len(ran.trials) == 3 + 4 - 1 + 2
    assert len({trial.key for trial in ran.trials}) == len(ran.trials)


def test_with_other_rounds_it_is_another_trial(tmp_path):
    ran = drive(tmp_path, study(methods=[GD], rounds={"coarse": 3, "fine": 4, "confirm": 6}), near(0.3))
    assert len(ran.trials) == 3 + 4 + 2


def test_a_trial_that_two_cells_share_is_run_once(tmp_path):
    """Two variants that differ in nothing that is run: both cells finish, the second for nothing."""
    of = study(methods=[GD, {**GD, "label": "again", "scale": {"learning_rate": "log"}}])
    ran = drive(tmp_path, of, near(0.3))
    assert ran.finished
    assert len(ran.trials) == 8
    for stage in ("coarse", "fine", "confirm"):
        assert ran.of("DP-FedGD", stage) == ran.of("again", stage) != []


def test_methods_that_differ_in_their_label_only_are_refused():
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
        found = Results.read(ledger)
    assert found.settings == ("other name / net / iid",)
    assert [cell.method.shown for cell in found.cells] == ["DP-FedGD", "ours"]
    assert all(len(cell.confirm) == 2 and cell.search.chosen for cell in found.cells)


def test_a_folder_with_other_trials_of_a_stage_is_refused(tmp_path):
    """As when a new version of the program means something else by the same study."""
    with Ledger.write(tmp_path) as ledger:
        ledger.add_stage(cell_id(study(), "DP-FedGD", 8), "grid", "coarse", ["of", "another", "version"])
        with pytest.raises(UserError, match=f"holds other coarse trials of '{cell('DP-FedGD')}' than this version"):
            Sweep(Blueprint.draw(study()), ledger)


def test_the_plan_knows_of_local_steps(monkeypatch):
    """Five times the steps take five times the time, but for the start."""
    monkeypatch.setattr(planning, "_gemm_rate", lambda: 1e6)

    def seconds(steps: int) -> float:
        axes = {"server_learning_rate": [0.1]}
        method = {"name": "dp-fedavg", "fixed": {"local_steps": steps}, "coarse": axes, "fine": axes}
        return plan(study(methods=[method])).seconds - planning.START_S

    assert seconds(5) == pytest.approx(5 * seconds(1))


def test_the_plan_is_what_is_run(tmp_path):
    """DP-FedGD's 0.1 is in both grids, so its fine stage has three trials of its own."""
    planned = plan(study())
    ran = drive(tmp_path, study(), near(0.3))
    assert planned.cells == 2
    assert planned.packs == {"coarse": 1, "fine": 1, "confirm": 1}, "both methods release the same thing"
    assert planned.trials == {"coarse": 3 + 4, "fine": 3 + 4, "confirm": 4}
    assert sum(planned.trials.values()) == len(ran.trials)
    assert planned.trial_rounds == sum(trial.rounds for trial in ran.trials) == 14 * 4 + 4 * 6


# ---- who wins


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
def test_the_rule_of_selection(outcomes, winner, within):
    found = choose(candidates_of("abc", 1), dict(zip("abc", outcomes, strict=True)), rows=100)
    assert (found.key, found.failed, found.within_standard_error) == (winner, 0, within)


def test_nothing_wins_where_nothing_ended_well():
    lost = {"a": ("diverged", None, None), "b": ("failed", None, None)}
    for seeds in (1, 2):
        assert choose(candidates_of("ab", seeds), lost, rows=100) is None
        assert win_contest(candidates_of("ab", seeds), lost) is None
    assert choose([], {}, rows=100) is None


def test_a_trial_named_twice_counts_once():
    found = choose(candidates_of("aabba", 1), {"a": ("done", 50, 1.0), "b": ("done", 50, 1.0)}, rows=100)
    assert (found.key, found.within_standard_error) == ("a", 2)


def test_last_comes_what_did_not_run_to_its_end():
    outcomes = {"a": ("stopped", 99.0, 0.1), "b": ("done", 1.0, 9.0), "c": ("done", 2.0, 9.0), "d": ("done", 2.0, 8.0)}
    assert [contender.key for contender in ranked(candidates_of("abcd", 1), outcomes)] == ["d", "c", "b"]


def test_ties_go_to_the_lower_loss_then_to_grid_order(tmp_path):
    def judge(trial):
        return "done", 50.0, {0.05: 0.7, 0.5: 0.7}.get(trial.hyperparameters["learning_rate"], 0.9)

    ran = drive(tmp_path, study(methods=[GD]), judge)
    assert rates(ran.of("DP-FedGD", "confirm")) == [0.05, 0.05]


def test_the_best_of_both_grids_is_confirmed(tmp_path):
    """The printed fine grid lies between 0.05 and 0.5; the coarse one had 1."""
    ran = drive(tmp_path, study(methods=[GD]), near(2))
    assert rates(ran.of("DP-FedGD", "confirm")) == [1.0, 1.0]


@pytest.mark.parametrize("best", [0.01, 0.1, 1.0])
def test_zoom_goes_on_around_the_coarse_winner(tmp_path, best):
    """Half a decade apart, a decade to either side, also beyond the edge of the grid."""
    ran = drive(tmp_path, study(methods=[GD], search={"refine": "zoom"}), near(best * 1.1))
    space = study(methods=[GD]).methods[0].space()
    expected = [c["learning_rate"] for c in search_spaces.refine(space, "zoom", {"learning_rate": best})]
    assert rates(ran.of("DP-FedGD", "fine")) == expected
    assert expected == pytest.approx([best / 10, best / 10**0.5, best, best * 10**0.5, best * 10], rel=1e-3)
    assert len(ran.trials) == 3 + 5 + 2 - len({0.01, 0.1, 1.0} & set(expected))


ZOOM = {"refine": "zoom"}


def zooms(ran, title="DP-FedGD") -> list[list[float]]:
    """The learning rates of every zoom, of the first seed."""
    return [rates(ran.of(title, stage))[:: len(SEEDS["search"])] for stage in ("fine", "finer", "finest")]


def test_zoom_follows_a_winner_over_the_edge(tmp_path):
    """The grid ends at 1, the best is at 1000: to 10, on to 100 by half a decade and a whole one, on to 1000; at most
    three zooms."""
    ran = drive(tmp_path, study(methods=[GD], seeds=SEEDS, search=ZOOM), near(1000))
    fine, finer, finest = zooms(ran)
    assert fine == pytest.approx([0.1, 10**-0.5, 1, 10**0.5, 10], rel=1e-3)
    assert finer == pytest.approx([10**0.75, 10**1.5, 100], rel=1e-3)
    assert finest == pytest.approx([10**1.75, 10**2.5, 1000], rel=1e-3)
    assert rates(ran.of("DP-FedGD", "confirm")) == [1000, 1000]


def test_zoom_goes_closer_while_those_beside_the_winner_differ(tmp_path):
    """`near` knows no noise, so half way to either side, and again."""
    ran = drive(tmp_path, study(methods=[GD], seeds=SEEDS, search=ZOOM), near(0.12))
    _, finer, finest = zooms(ran)
    assert finer == pytest.approx([10**-1.25, 10**-0.75], rel=1e-3)
    assert finest == pytest.approx([10**-1.125, 10**-0.875], rel=1e-3)
    assert rates(ran.of("DP-FedGD", "confirm")) == pytest.approx([10**-0.875] * 2, rel=1e-3)


def test_zoom_ends_where_those_beside_the_winner_are_as_good(tmp_path):
    """Seeds move every score by more than half a decade does."""
    luck = {1: -20.0, 2: 0.0, 3: 20.0}

    def judge(trial):
        state, accuracy, loss = near(0.1)(trial)
        away = trial.hyperparameters["learning_rate"] != 0.1
        return state, accuracy + (luck.get(trial.seed, 0.0) if away else 0.0), loss

    ran = drive(tmp_path, study(methods=[GD], seeds=SEEDS, search=ZOOM), judge)
    assert (cell("DP-FedGD"), "grid", "finer") not in ran.stages
    assert rates(ran.of("DP-FedGD", "confirm")) == [0.1, 0.1]


def test_only_axes_in_question_are_zoomed_again(tmp_path):
    """rho = 1 is ahead by -1, 0 and 4 over the seeds, no more than noise, and lies inside its axis: it stays."""
    method = {
        "name": "dp-fedsofim",
        "fixed": {"beta": 0.9},
        "coarse": {"learning_rate": [0.01, 0.1, 1], "rho": [0.1, 1, 10]},
        "fine": {"learning_rate": [0.1], "rho": [1]},
    }

    def judge(trial):
        state, accuracy, loss = near(0.12)(trial)
        return state, accuracy - (trial.hyperparameters["rho"] != 1) * {1: -1.0, 2: 0.0}.get(trial.seed, 4.0), loss

    ran = drive(tmp_path, study(methods=[method], seeds=SEEDS, search=ZOOM), judge)
    assert {trial.hyperparameters["rho"] for trial in ran.of("DP-FedSOFIM", "finer")} == {1.0}
    assert len(ran.of("DP-FedSOFIM", "finer")) == 2 * 3


# ---- several seeds, and a contest


SEEDS = {"search": [1, 2, 3], "contest": [11, 12], "confirm": [42, 7]}


def lucky(best: float, luck: dict[tuple[float, int], float]):
    """As `near`, but for some (learning rate, seed) by so much more."""

    def judge(trial):
        state, accuracy, loss = near(best)(trial)
        return state, accuracy + luck.get((trial.hyperparameters["learning_rate"], trial.seed), 0.0), loss

    return judge


def test_a_configuration_is_judged_by_its_mean_over_seeds(tmp_path):
    """0.01 is the best of all trials with seed 2; over three seeds it is not."""
    of = study(methods=[GD], seeds={**SEEDS, "contest": []})
    ran = drive(tmp_path, of, lucky(0.1, {(0.01, 2): 25.0}))
    assert [(t.hyperparameters["learning_rate"], t.seed) for t in ran.of("DP-FedGD", "coarse")][:4] == [
        *((0.01, 1), (0.01, 2), (0.01, 3)),
        (0.1, 1),
    ]
    assert rates(ran.of("DP-FedGD", "confirm")) == [0.1, 0.1]
    assert len(ran.trials) == 3 * (3 + 4 - 1) + 2


def test_the_best_meet_again_on_fresh_seeds(tmp_path):
    """The search takes 0.1 for the best, by luck; the contest, as long as confirm and on validation rows, does not."""
    luck = {(0.1, seed): 20.0 for seed in SEEDS["search"]}
    of = study(methods=[GD], seeds=SEEDS, search={"finalists": 3})
    ran = drive(tmp_path, of, lucky(0.5, luck))
    contest = ran.of("DP-FedGD", "contest")
    assert [(t.hyperparameters["learning_rate"], t.seed) for t in contest] == [
        *((0.1, 11), (0.1, 12)),  # the best of the search first
        *((0.5, 11), (0.5, 12)),
        *((0.3, 11), (0.3, 12)),
    ]
    assert {trial.rounds for trial in contest} == {6}
    assert {(t.problem.train_on, t.problem.evaluate_on) for t in contest} == {("train", "validation")}
    assert rates(ran.of("DP-FedGD", "confirm")) == [0.5, 0.5]
    found = status.read(tmp_path)
    assert found["finished"]
    assert found["cells"][0]["best_validation_accuracy"] == 90
    assert found["cells"][0]["stages"]["contest"] == {"done": 6, "total": 6}


def test_status_names_who_won_and_not_the_best_mean(tmp_path):
    """0.3 is ahead of 0.1 in the contest by 10 and -8: a tie, and 0.1 has the smaller spread."""
    contest = {(0.3, 11): 60.0, (0.3, 12): 42.0, (0.1, 11): 50.0, (0.1, 12): 50.0}

    def judge(trial):
        if trial.rounds == 6:
            return "done", contest.get((trial.hyperparameters["learning_rate"], trial.seed), 20.0), 1.0
        return near(0.2)(trial)

    ran = drive(tmp_path, study(methods=[GD], seeds=SEEDS), judge)
    assert rates(ran.of("DP-FedGD", "confirm")) == [0.1, 0.1]
    (found,) = status.read(tmp_path)["cells"]
    assert (found["best_validation_accuracy"], found["best_hyperparameters"]) == (50.0, {"learning_rate": 0.1})


def test_a_configuration_enters_a_contest_once(tmp_path):
    """0.1 runs twice in the search, with 3 rounds and with 4."""
    of = study(methods=[GD], seeds=SEEDS, rounds={"coarse": 3, "fine": 4, "confirm": 6})
    ran = drive(tmp_path, of, near(0.1))
    assert sorted(set(rates(ran.of("DP-FedGD", "contest")))) == [0.01, 0.05, 0.1, 0.3, 0.5, 1.0]
    assert len(ran.of("DP-FedGD", "contest")) == 6 * 2


def test_both_ways_of_picking_share_their_trials(tmp_path):
    """`single` sees the first seed alone, and confirms what that one likes best."""
    luck = {(0.01, 1): 15.0}
    of = study(methods=[GD], seeds=SEEDS, search={"select": ["contest", "single"]})
    ran = drive(tmp_path, of, lucky(0.1, luck))
    assert rates(ran.of("DP-FedGD", "confirm")) == [0.1, 0.1]
    assert rates(ran.of("DP-FedGD", "confirm", "grid single")) == [0.01, 0.01]
    assert (cell("DP-FedGD"), "grid single", "contest") not in ran.stages
    assert {t.seed for t in ran.of("DP-FedGD", "coarse", "grid single")} == {1}
    assert len(ran.trials) == 3 * 6 + 2 * 6 + 2 + 2, "its search is a part of the other's"
    assert set(ran.choices) == {cell("DP-FedGD"), f"{cell('DP-FedGD')} (grid single)"}
    assert status.read(tmp_path)["finished"]


def scored(*rows: tuple[float | None, ...]):
    """Contenders a, b, … with these scores, seed by seed; None: diverged."""
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
        # b leads by 2, 2.1 and 1.9: no tie, whatever the spreads
        ([(50, 51, 52), (52.0, 53.1, 53.9)], "b", 1),
        # b leads a by 1 on average, but by 4, -3 and 2, a standard error of 2.08: a tie, and a has the smaller spread
        ([(50, 50, 50), (54, 47, 52)], "a", 2),
        # the same spread as well: the earlier
        ([(50, 52, 51), (51, 50, 52)], "a", 2),
        # the best mean of all, but lost on one seed
        ([(90, 90, None), (50, 50, 50), (40, 40, 40)], "b", 1),
        # all lost on some seed: the one that lost fewest
        ([(90, None, None), (50, None, 50)], "b", 1),
        # one seed: only what is equal is a tie
        ([(50.0,), (50.1,), (50.1,)], "b", 2),
    ],
)
def test_the_rule_of_a_contest(rows, winner, tied):
    found = win_contest(*scored(*rows))
    assert (found.key[0], found.within_standard_error) == (winner, tied)


def test_a_contest_of_errors_is_won_by_the_smallest():
    assert win_contest(*scored((3.0, 3.1), (1.0, 1.1), (2.0, 2.1)), SQUARED_ERROR).key == "b1"


@given(st.lists(st.tuples(*[st.floats(0, 100)] * 3), min_size=1, max_size=6), st.randoms())
def test_no_order_of_arrival_changes_who_wins(rows, chance):
    """Outcomes are read by name: a ledger that was filled in another order gives the same winner."""
    contenders, outcomes = scored(*rows)
    shuffled = list(outcomes.items())
    chance.shuffle(shuffled)
    assert win_contest(contenders, dict(shuffled)) == win_contest(contenders, outcomes)


@given(st.lists(st.tuples(*[st.floats(0, 100)] * 3), min_size=1, max_size=6))
def test_the_winner_of_a_contest_is_not_told_from_the_best(rows):
    contenders, outcomes = scored(*rows)
    found = win_contest(contenders, outcomes)
    best = max(statistics.fmean(row) for row in rows)
    lead = [paired_difference(row, _scores(found, outcomes)) for row in rows if statistics.fmean(row) == best]
    assert any(mean <= error for mean, error in lead)
    assert 1 <= found.within_standard_error <= len(rows)


def _scores(found, outcomes) -> list[float]:
    return [outcomes[key][1] for key in found.candidate.keys]


# ---- partitions that vary


@pytest.mark.parametrize(
    ("given", "search", "contest", "confirm"),
    [
        (9, {1: 9, 2: 9, 3: 9}, {11: 9, 12: 9}, {42: 9, 7: 9}),
        ("per-seed", {1: 1, 2: 2, 3: 3}, {11: 11, 12: 12}, {42: 42, 7: 7}),
        ([5, 6], {1: 5, 2: 6, 3: 5}, {11: 5, 12: 6}, {42: 5, 7: 6}),
    ],
)
def test_a_run_s_partition_follows_from_its_seed(tmp_path, given, search, contest, confirm):
    of = study(methods=[GD], seeds={**SEEDS, "partition": given})
    ran = drive(tmp_path, of, near(0.3))
    for stage, expected in (("coarse", search), ("fine", search), ("contest", contest), ("confirm", confirm)):
        assert {t.seed: t.problem.partition.seed for t in ran.of("DP-FedGD", stage)} == expected
    with Ledger.read(tmp_path) as ledger:
        tables = [path.name for path in write_tables(ledger, tmp_path)]
    assert ("partitions.md" in tables) == (given != 9)
    dealt = read_best(tmp_path / "best.yaml")[cell("DP-FedGD")]["partition_seed"]
    assert dealt == (9 if given == 9 else confirm)


# ---- axes that are no method's own


def test_clip_and_rounds_may_be_searched_over(tmp_path):
    """The budget stays: more rounds mean more noise in each. Confirm runs as many as the winner has."""
    axes = {"learning_rate": [0.1], "clip": [1, 10], "rounds": [2, 4]}
    of = study(methods=[{"name": "dp-fedgd", "coarse": axes, "fine": axes}], seeds=SEEDS)

    def judge(trial):
        return "done", 50.0 + trial.rounds - trial.privacy.clip, 1.0

    ran = drive(tmp_path, of, judge)
    coarse = ran.of("DP-FedGD", "coarse")[::3]
    assert [(t.privacy.clip, t.rounds) for t in coarse] == [(1, 2), (1, 4), (10, 2), (10, 4)]
    assert all(t.privacy.epsilon == 8 and "clip" not in t.hyperparameters for t in coarse)
    assert {(t.privacy.clip, t.rounds) for t in ran.of("DP-FedGD", "contest")} == {(1, 2), (1, 4), (10, 2), (10, 4)}
    assert [(t.privacy.clip, t.rounds) for t in ran.of("DP-FedGD", "confirm")] == [(1, 4), (1, 4)]
    noise = {t.rounds: plan_of(t, [100] * 4).noise_std["gradient"] for t in coarse[:2]}
    assert noise[4] == pytest.approx(noise[2] * 2**0.5, rel=1e-5)
    with Ledger.read(tmp_path) as ledger:
        (found,) = Results.read(ledger).cells
    assert found.search.chosen == {"learning_rate": 0.1, "clip": 1.0, "rounds": 4}
    assert (found.last, found.search.tried["clip"]) == (4, (1.0, 10.0))


def test_halving_needs_equal_rounds():
    axes = {"learning_rate": [0.1], "rounds": [2, 4]}
    with pytest.raises(ValueError, match="DP-FedGD searches over rounds, but halving compares after equal rounds"):
        study(methods=[{"name": "dp-fedgd", "coarse": axes}], search={"strategies": ["halving"]})


# ---- what does not run to its end


@pytest.mark.parametrize("state", ["diverged", "failed"])
def test_a_cell_without_a_winner_ends_without_confirm(tmp_path, state):
    def judge(trial):
        return near(0.3)(trial) if trial.method == "dp-fedsofim" else (state, None, None)

    ran = drive(tmp_path, study(), judge)
    assert ran.finished
    assert (cell("DP-FedGD"), "grid", "fine") not in ran.stages
    assert (cell("DP-FedGD"), "grid", "confirm") not in ran.stages
    assert ran.choices == {cell("DP-FedGD"): None, cell("DP-FedSOFIM"): ran.of("DP-FedSOFIM", "fine")[0].key}
    assert len(ran.of("DP-FedSOFIM", "confirm")) == 2
    found = status.read(tmp_path)
    assert found["finished"]
    assert found["trials"] == {state: 3, "done": 4 + 4 + 2}
    again = drive(tmp_path, study(), judge).trials
    assert len(again) == (3 if state == "failed" else 0), "what failed may have had a passing cause and is tried again"


def test_what_failed_is_tried_again_unless_something_was_built_on_it(tmp_path):
    """The first coarse trial of a cell fails, the others do not: the fine stage is built without it, and so it stays.
    A confirm trial that fails is the last of its line: it is tried again, and its row replaced."""
    once = {}

    def judge(trial):
        first = once.setdefault(trial.rounds, trial.key) == trial.key
        return ("failed", None, None) if first else near(0.3)(trial)

    ran = drive(tmp_path, study(methods=[GD]), judge)
    assert ran.finished
    again = drive(tmp_path, study(methods=[GD]), near(0.3))
    assert [trial.rounds for trial in again.trials] == [6]
    with Ledger.read(tmp_path) as ledger:
        states = Counter(state for state, _, _ in ledger.outcomes().values())
    assert states["failed"] == 1


@pytest.mark.parametrize("strategy", ["grid", "optuna"])
def test_what_a_winner_was_chosen_without_stays_out(tmp_path, strategy):
    """The winner is confirmed: a fine or an Optuna trial that failed is not tried again, it might win now."""
    of = study(methods=[GD], search={"strategies": [strategy], "optuna": {"batch": 3}})

    def judge(trial):
        searched = trial.rounds == 4
        return ("failed", None, None) if searched and trial.hyperparameters["learning_rate"] < 0.09 else near(1)(trial)

    first = drive(tmp_path, of, judge)
    stages = ("fine",) if strategy == "grid" else ("optuna",)
    assert any(
        trial.hyperparameters["learning_rate"] < 0.09 for s in stages for trial in first.of("DP-FedGD", s, strategy)
    )
    assert drive(tmp_path, of, near(0.01)).trials == []


def test_optuna_trials_that_failed_are_not_tried_again_half_way(tmp_path):
    """It was told of the failure and went on from there: what it asked next was asked for that reason."""
    of = study(methods=[GD], search=OPTUNA)
    failing = drive(tmp_path, of, lambda trial: ("failed", None, None), batch=3, stop_after=3)
    again = drive(tmp_path, of, near(0.3))
    assert not {trial.key for trial in failing.trials} & {trial.key for trial in again.trials}


def test_what_optuna_asks_at_once_knows_of_one_another():
    """Those that are still out are taken for bad ones: else a batch would crowd around the best so far."""
    assert _Sampler(seed=1)._study.sampler._constant_liar


def test_optuna_is_told_what_is_better_whatever_the_objective():
    """Of an error less is better: the best it knows is the trial with the least."""
    for objective, best in (("accuracy", 2), ("loss", 0)):
        (one,) = Blueprint.draw(study(methods=[GD], objective=objective, search=OPTUNA)).cells
        outcomes = {}
        search = CellSearch(one, one.study.variants[0], outcomes, 10)
        stage, batch = search.next_stage()
        search.open(stage, batch)
        outcomes.update({trial.key: ("done", 10.0 + i, 1.0) for i, trial in enumerate(batch)})
        search.next_stage()
        assert search.history.memo["optuna"]._study.best_trial.number == best


def test_optuna_replays_its_batches_without_a_cache():
    """What it asks next is a function of the results alone: a history without a cache gives the same proposal."""
    (one,) = Blueprint.draw(study(methods=[GD], search=OPTUNA)).cells
    outcomes = {}
    search = CellSearch(one, one.study.variants[0], outcomes, 10)
    for _ in range(2):
        stage, batch = search.next_stage()
        search.open(stage, batch)
        outcomes.update({trial.key: ("done", 10.0 + i, 1.0) for i, trial in enumerate(batch)})
    search.history.memo.clear()
    again = Optuna().propose(search.task, search.history)
    assert again == Optuna().propose(search.task, dataclasses.replace(search.history, memo={}))
    assert again.configurations


def test_a_fine_grid_that_diverges_leaves_the_coarse_winner(tmp_path):
    def judge(trial):
        coarse = trial.hyperparameters["learning_rate"] in (0.01, 0.1, 1)
        return near(0.3)(trial) if coarse else ("diverged", None, None)

    ran = drive(tmp_path, study(methods=[GD]), judge)
    assert rates(ran.of("DP-FedGD", "confirm")) == [0.1, 0.1]  # 0.3 is nearer to 0.1 than to 1, in decades


def test_confirm_trials_that_diverge_end_the_cell_all_the_same(tmp_path):
    def judge(trial):
        return ("diverged", None, None) if trial.rounds == 6 else near(0.3)(trial)

    assert drive(tmp_path, study(), judge).finished
    assert status.read(tmp_path)["finished"]


# ---- the budgets beside


def test_the_best_of_the_budgets_beside_meet_in_the_contest(tmp_path):
    """At every budget another rate is best; each contest has room for two."""
    best = {1: 0.01, 2: 0.1, 4: 1}

    def judge(trial):
        return near(best[trial.privacy.epsilon])(trial)

    of = {
        "methods": [{**GD, "fine": {"learning_rate": [0.01, 0.1, 1]}}],
        "epsilons": [4, 1, 2],
        "seeds": {"search": [1], "contest": [11], "confirm": [21]},
    }

    def contests(warm: bool) -> dict[float, set[float]]:
        ran = drive(tmp_path / str(warm), study(**of, search={"warm_start": warm, "finalists": 2}), judge)
        assert ran.finished
        return {eps: set(rates(ran.of("DP-FedGD", "contest", epsilon=eps))) for eps in best}

    assert contests(warm=False) == {1: {0.01, 0.1}, 2: {0.1, 0.01}, 4: {1, 0.1}}
    assert contests(warm=True) == {1: {0.01, 0.1}, 2: {0.1, 1}, 4: {1, 0.1}}


def test_the_winner_of_a_budget_has_a_place_before_its_guests(tmp_path):
    of = study(
        methods=[GD],
        epsilons=[1, 2, 4],
        seeds={"search": [1], "contest": [11], "confirm": [21]},
        search={"warm_start": True, "finalists": 1},
    )
    ran = drive(tmp_path, of, lambda trial: near({1: 0.01, 2: 0.1, 4: 1}[trial.privacy.epsilon])(trial))
    assert [rates(ran.of("DP-FedGD", "contest", epsilon=eps)) for eps in (1, 2, 4)] == [[0.01], [0.1], [1.0]]


def test_a_trial_that_failed_is_final_once_a_contest_beside_was_built_on_it(tmp_path):
    """Its own cell has no contest yet: tried again, it might win, and the recorded contest would be another one."""
    of = study(
        methods=[{"name": "dp-fedgd", "coarse": {"learning_rate": [0.01, 0.1]}, "fine": {"learning_rate": [1]}}],
        epsilons=[1, 2, 4],
        seeds={"search": [1], "contest": [11], "confirm": [21]},
        search={"warm_start": True, "finalists": 2},
    )

    def judge(trial):
        if trial.privacy.epsilon == 2 and trial.hyperparameters["learning_rate"] == 1 and not again:
            return "failed", None, None
        return near(0.01 if trial.privacy.epsilon == 1 else 1)(trial)

    again = False
    with Ledger.write(tmp_path) as ledger:
        ledger.add_study(of.model_dump_json(), "by hand")
        sweep = Sweep(Blueprint.draw(of), ledger)
        while not any(key[2] == "contest" for key in ledger.stages()):
            early = [trial for trial in sweep.waiting.values() if trial.privacy.epsilon < 4]
            rows = [row(trial, judge(trial)) for trial in early[:1]]
            ledger.add(rows)
            sweep.ended({r.key: (r.state, r.accuracy, r.loss) for r in rows})
    again = True
    assert drive(tmp_path, of, judge).finished


def test_a_budget_more_would_change_contests_that_were_held(tmp_path):
    old, new = (study(epsilons=e, seeds={"contest": [11]}, search={"warm_start": True}) for e in ([1], [1, 2]))
    with pytest.raises(UserError, match=r"epsilons = \[1.0, 2.0\]: with search.warm_start .* depend on \[1.0\]"):
        check_extension(old, new)


def test_where_the_budgets_beside_cannot_be_asked(tmp_path):
    with pytest.raises(ValueError, match="warm_start brings more finalists to a contest, and there is none"):
        study(search={"warm_start": True, "select": "single"})
    with pytest.raises(UserError, match=r"shard = 2/3: with search.warm_start"):
        study_run.run(study(search={"warm_start": True}), "", tmp_path, View(), shard=(2, 3))


# ---- cut off and taken up again


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
    """Depends on all of a configuration, and on nothing else."""
    if trial.hyperparameters["learning_rate"] > 0.9 and trial.rounds == 4:
        return "diverged", None, None
    state, accuracy, _ = near(0.2)(trial)
    return state, accuracy, trial.hyperparameters.get("rho", 1.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sweep_cut_off_anywhere_goes_on_the_same(tmp_path, strategy):
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
def test_a_row_s_key_is_that_of_its_trial(tmp_path, strategy):
    """The key is the hash of all that can change the result: read back, the trial must have the same one."""
    drive(tmp_path, study(**STRATEGIES[strategy]), sometimes_diverging)
    with Ledger.read(tmp_path) as ledger:
        for key, found in ledger.rows(ledger.outcomes()).items():
            assert found.trial.key == key


def test_a_finished_sweep_has_nothing_to_run(tmp_path):
    drive(tmp_path, study(), near(0.3))
    before = (tmp_path / "ledger.sqlite").read_bytes()
    with Ledger.write(tmp_path) as ledger:
        sweep = Sweep(Blueprint.draw(study()), ledger)
        assert sweep.finished
        assert sweep.waiting == {}
    assert (tmp_path / "ledger.sqlite").read_bytes() == before, "and nothing is written"


class DyingLedger:
    """A ledger whose process dies at its n-th write, before or after that is on the disk."""

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
def test_a_driver_that_dies_at_any_write(tmp_path, after):
    of = study(search={"strategies": ["grid", "optuna"], "optuna": {"batch": 4}})
    blueprint = Blueprint.draw(of)
    whole = drive(tmp_path / "whole", of, sometimes_diverging)
    for writes in itertools.count(1):
        folder = tmp_path / str(writes)
        with Ledger.write(folder) as ledger:
            dying = DyingLedger(ledger, writes, after)
            try:
                sweep = Sweep(blueprint, dying)
                while not sweep.finished:
                    rows = [row(trial, sometimes_diverging(trial)) for trial in list(sweep.waiting.values())[:5]]
                    dying.add(rows)
                    sweep.ended({r.key: (r.state, r.accuracy, r.loss) for r in rows})
            except KeyboardInterrupt:
                pass
            else:
                assert writes > 15, "the test must have died somewhere"
                return
        second = drive(folder, of, sometimes_diverging)
        assert second.stages == whole.stages
        assert second.choices == whole.choices


# ---- a study that grows


def test_more_confirm_seeds_run_alone(tmp_path):
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


def test_more_of_everything_else_runs_alone(tmp_path):
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


def test_a_second_way_of_searching_runs_alone(tmp_path):
    first = drive(tmp_path, study(methods=[GD]), near(0.3))
    second = drive(tmp_path, study(methods=[GD], search={"strategies": ["grid", "optuna"]}), near(0.3))
    assert {key for key in second.stages if key not in first.stages} == {
        (cell_id(study(), "DP-FedGD", 8), "optuna", "optuna"),
        (cell_id(study(), "DP-FedGD", 8), "optuna", "confirm"),
    }
    keys = second.stages[cell_id(study(), "DP-FedGD", 8), "optuna", "optuna"]
    assert {trial.key for trial in second.trials if trial.rounds == 4} == set(keys)


def test_status_of_a_sweep_that_is_cut_off(tmp_path):
    drive(tmp_path, study(), near(0.3), stop_after=5, batch=1)
    found = status.read(tmp_path)
    assert not found["finished"]
    assert found["running"] is None
    assert (found["cells_ended"], found["cells_total"]) == (0, 2)
    assert found["trials"] == {"done": 5}
    gd = next(entry for entry in found["cells"] if entry["cell"] == cell("DP-FedGD"))
    assert gd["stages"] == {"coarse": {"done": 3, "total": 3}, "fine": {"done": 1, "total": 4}}
    assert gd["best_validation_accuracy"] == pytest.approx(90 - 10 * math.log10(3))  # 0.1 and 0.3
    assert "not finished, 0 of 2 cells ended" in status.as_text(found)


@pytest.mark.parametrize(
    ("strategy", "state", "ended"),
    [
        ("grid", "done", False),  # fine is still to be opened
        ("grid", "diverged", True),  # there is nothing to refine
        ("optuna", "done", False),
        ("optuna", "diverged", False),  # three of seven: the next batch is still to be asked
    ],
)
def test_status_where_the_driver_died_between_a_result_and_the_next_stage(tmp_path, strategy, state, ended):
    of = study(methods=[GD], search={"strategies": [strategy], "optuna": {"batch": 3}})
    drive(tmp_path, of, near(0.3), stop_after=0)
    with Ledger.write(tmp_path) as ledger:
        waiting = Sweep(Blueprint.draw(of), ledger).waiting.values()
        ledger.add([row(trial, near(0.3)(trial) if state == "done" else (state, None, None)) for trial in waiting])
    found = status.read(tmp_path)
    assert (found["finished"], found["cells_ended"]) == (ended, int(ended))


# ---- optuna


OPTUNA = {"strategies": ["optuna"], "optuna": {"batch": 3}}


def test_optuna_has_the_budget_of_the_grids(tmp_path):
    """3 + 4 and 4 + 4 trials, though a configuration is in both grids."""
    ran = drive(tmp_path, study(search=OPTUNA), near(0.3))
    assert len(ran.of("DP-FedGD", "optuna", "optuna")) == 7
    assert len(ran.of("DP-FedSOFIM", "optuna", "optuna")) == 8
    assert ran.finished


def test_optuna_asks_in_batches(tmp_path):
    """The next three come only when the last three are told."""
    with Ledger.write(tmp_path) as ledger:
        sweep = Sweep(Blueprint.draw(study(methods=[GD], search=OPTUNA)), ledger)
        sizes = []
        while not sweep.finished:
            batch = list(sweep.waiting.values())
            sizes.append(len(batch))
            first, *rest = batch
            sweep.ended({first.key: near(0.3)(first)})
            assert list(sweep.waiting.values()) == rest or not rest
            sweep.ended({trial.key: near(0.3)(trial) for trial in rest})
    assert sizes == [3, 3, 1, 2], "seven trials by threes, then the two confirm seeds"


def test_optuna_is_deterministic_and_depends_on_its_seed(tmp_path):
    runs = [drive(tmp_path / name, study(search=OPTUNA), near(0.3)) for name in "ab"]
    assert runs[0].stages == runs[1].stages
    other = drive(tmp_path / "c", study(search={**OPTUNA, "optuna": {"batch": 3, "seed": 1}}), near(0.3))
    assert other.stages != runs[0].stages


def test_optuna_learns(tmp_path):
    """It starts with ten random trials, the same whatever it is told; the last ones lie where it was told to look."""
    method = {
        "name": "dp-fedgd",
        "coarse": {"learning_rate": [1e-4, 10]},
        "fine": {"learning_rate": [0.1 + 0.001 * k for k in range(40)]},
    }
    found = {}
    for best in (0.003, 3):
        ran = drive(tmp_path / str(best), study(methods=[method], search=OPTUNA), near(best))
        found[best] = rates(ran.of("DP-FedGD", "optuna", "optuna"))
        assert len(found[best]) == 42
    assert found[0.003][:9] == found[3][:9]
    assert statistics.median(found[0.003][-20:]) < 0.05 < statistics.median(found[3][-20:])


def test_optuna_stays_within_the_axes(tmp_path):
    """Between the lowest and the highest value of both grids; whole numbers whole, words and fixed values as given."""
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


def test_optuna_with_an_axis_from_zero(tmp_path):
    """mu0 = 0 is allowed, and its scale is logarithmic."""
    method = {
        "name": "dp-adafedprox",
        "fixed": {"local_steps": 1, "client_learning_rate": 0.1, "server_learning_rate": 1},
        "coarse": {"mu0": [0, 0.1]},
        "fine": {"mu0": [1]},
    }
    ran = drive(tmp_path, study(methods=[method], search=OPTUNA), lambda trial: ("done", 50.0, 1.0))
    assert ran.finished


def test_optuna_runs_a_configuration_once_however_often_it_asks(tmp_path):
    """One axis of two whole numbers: five asked, at most two different."""
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


def test_optuna_is_told_the_mean_over_seeds(tmp_path):
    """Two folders whose seeds differ but whose means do not: the same suggestions."""
    of = study(methods=[GD], seeds=SEEDS, search={**OPTUNA, "trials": 15})
    luck = {1: 5.0, 2: -5.0}

    def unequal(trial):
        state, accuracy, loss = near(0.3)(trial)
        return state, accuracy + luck.get(trial.seed, 0.0), loss

    plain, moved = drive(tmp_path / "a", of, near(0.3)), drive(tmp_path / "b", of, unequal)
    assert plain.stages == moved.stages
    assert len(plain.of("DP-FedGD", "optuna", "optuna")) == 15 * 3


def test_the_number_of_configurations_may_be_set(tmp_path):
    for strategy in ("optuna", "random"):
        ran = drive(tmp_path / strategy, study(methods=[GD], search={"strategies": [strategy], "trials": 5}), near(0.3))
        assert len(ran.of("DP-FedGD", strategy, strategy)) == 5
        assert status.read(tmp_path / strategy)["finished"]


def test_a_random_search_draws_all_at_once_and_from_its_seed(tmp_path):
    random = {"strategies": ["random"], "trials": 20}
    of = study(methods=[GD], search=random)
    runs = [drive(tmp_path / name, of, near(best)) for name, best in (("a", 1), ("b", 0.01))]
    found = [rates(ran.of("DP-FedGD", "random", "random")) for ran in runs]
    assert found[0] == found[1], "it does not learn"
    assert all(0.01 <= rate <= 1 for rate in found[0])
    assert 5 <= sum(rate < 0.1 for rate in found[0]) <= 15, "half of them in each decade: the scale is logarithmic"
    other = drive(tmp_path / "c", study(methods=[GD], search={**random, "random": {"seed": 1}}), near(1))
    assert rates(other.of("DP-FedGD", "random", "random")) != found[0]


def test_optuna_goes_on_where_trials_diverge(tmp_path):
    ran = drive(tmp_path, study(methods=[GD], search=OPTUNA), lambda trial: ("diverged", None, None))
    assert ran.finished
    assert len(ran.trials) == 7
    assert ran.choices == {cell("DP-FedGD"): None}
    assert status.read(tmp_path)["finished"]


# ---- successive halving

HALVING = {"strategies": ["halving"], "trials": 9}
RUNG = ("rung-1", "rung-2", "rung-3")


def climbed(ran, *rungs: str) -> list[list[TrialSpec]]:
    return [ran.of("DP-FedGD", rung, "halving") for rung in rungs or RUNG]


def test_the_best_of_a_rung_run_three_times_as_long(tmp_path):
    ran = drive(tmp_path, study(methods=[GD], rounds={"fine": 90, "confirm": 90}, search=HALVING), near(0.3))
    rungs = climbed(ran)
    assert [len(rung) for rung in rungs] == [27, 9, 3]
    assert [{trial.last_round for trial in rung} for rung in rungs] == [{10}, {30}, {90}]
    assert sum(trial.last_round for rung in rungs for trial in rung) == 9 * 90, "as many rounds as nine that end"
    assert {trial.rounds for rung in rungs for trial in rung} == {90}, "each is calibrated for all its rounds"
    closeness = [
        sorted(abs(math.log(trial.hyperparameters["learning_rate"] / 0.3)) for trial in rung) for rung in rungs
    ]
    assert closeness[1:] == [closeness[0][:9], closeness[0][:3]]
    (winner,) = {trial.hyperparameters["learning_rate"] for trial in ran.of("DP-FedGD", "confirm", "halving")}
    assert abs(math.log(winner / 0.3)) == closeness[0][0]
    assert status.read(tmp_path)["finished"]


@pytest.mark.parametrize(
    ("rungs", "keep", "trials", "sizes"), [(2, 0.5, 5, [5, 3]), (2, 0.3, 5, [8, 3]), (5, 0.5, 3, [9, 5, 3, 2, 1])]
)
def test_rungs_round_up(rungs, keep, trials, sizes):
    """0.3 of 8 is 2.4, so three go on; half of nine is five."""
    assert HalvingSettings(rungs=rungs, keep=keep).sizes(trials, 1000) == sizes


@pytest.mark.parametrize("last", [1, 2, 7, 70, 90])
def test_a_ladder_costs_no_more_than_it_may(last):
    halving = HalvingSettings()
    rounds, sizes = halving.rounds(last), halving.sizes(40, last)
    assert rounds[-1] == last
    assert rounds == sorted(rounds)
    assert sum(n * t for n, t in zip(sizes, rounds, strict=True)) <= 40 * last + 2 * last, "two may be rounded up"


def test_a_rung_is_cut_by_the_mean_over_seeds_and_who_is_lost_on_one_comes_last(tmp_path):
    """The largest rate shines on one seed, the second largest is lost on one, wherever they meet."""
    of = study(methods=[GD], seeds={"search": [1, 2]}, search={**HALVING, "halving": {"rungs": 2, "keep": 0.5}})
    rates_drawn = sorted({t.hyperparameters["learning_rate"] for t in first_rung(of)})

    def judge(trial):
        rate = trial.hyperparameters["learning_rate"]
        if rate == rates_drawn[-1] and trial.stop_after:
            return "done", 99.0 if trial.seed == 1 else 0.0, 1.0
        if rate == rates_drawn[-2] and trial.seed == 2:
            return "diverged", None, None
        return "done", 60.0 + rate, 1.0

    ran = drive(tmp_path, of, judge)
    first, second = (sorted({t.hyperparameters["learning_rate"] for t in rung}) for rung in climbed(ran, *RUNG[:2]))
    assert first == rates_drawn
    kept = math.ceil(len(first) / 2)
    assert second == first[-2 - kept : -2]


def first_rung(of) -> list[TrialSpec]:
    (cell_of,) = Blueprint.draw(of).cells
    return CellSearch(cell_of, of.variants[0], {}, 10).next_stage().trials


@pytest.mark.parametrize("given", [{"fixed": {"rounds": 90}}, {"rounds": 90}])
def test_rungs_are_parts_of_the_rounds_that_a_method_has(tmp_path, given):
    of = study(methods=[{**GD, **given}], search=HALVING)
    ran = drive(tmp_path, of, near(0.3))
    assert [{trial.last_round for trial in rung} for rung in climbed(ran)] == [{10}, {30}, {90}]
    assert [len(rung) for rung in climbed(ran)] == [27, 9, 3]


def test_tables_and_exports_tell_rungs_apart(tmp_path):
    """After a ninth of the rounds the smallest rates shine; in the end the largest do."""

    def judge(trial):
        rate = trial.hyperparameters["learning_rate"]
        return "done", 90 - 10 * rate if trial.stop_after else 50 + 10 * rate, 1.0

    of = study(methods=[GD], rounds={"fine": 90, "confirm": 90}, search=HALVING)
    ran = drive(tmp_path, of, judge)
    last = rates(climbed(ran, "rung-3")[0])
    with Ledger.read(tmp_path) as ledger:
        (found,) = Results.read(ledger).cells
        (page,) = gather(ledger, "x")["cells"]
        export(ledger, "optuna", tmp_path / "optuna")
    assert found.search.chosen["learning_rate"] == found.search.by_one_seed["learning_rate"] == max(last)
    assert (found.search.found_in, found.search.configurations) == (("rung-3",), 27)
    assert (found.search.trials, found.search.trial_rounds) == (27 + 9 + 3, 27 * 10 + 9 * 30 + 3 * 90)
    search = page["search"]
    winner = search["winner"]
    assert search["stages"][winner] == ["rung-3"]
    assert (search["mean"][winner], search["seeds"][winner]) == (pytest.approx(50 + 10 * max(last), rel=1e-5), 1)
    (name,) = optuna.get_all_study_names(storage := f"sqlite:///{tmp_path / 'optuna' / 'optuna.db'}")
    trials = optuna.load_study(study_name=name, storage=storage).trials
    assert Counter(trial.state.name for trial in trials) == {"PRUNED": 27 + 9, "COMPLETE": 3}


def test_before_a_rung_has_results_the_one_below_leads(tmp_path):
    of = study(methods=[GD], search=HALVING)
    first = first_rung(of)
    drive(tmp_path, of, near(0.3), stop_after=len(first))
    (found,) = status.read(tmp_path)["cells"]
    assert found["stages"]["rung-2"]["done"] == 0
    assert found["best_validation_accuracy"] is not None
    with Ledger.read(tmp_path) as ledger:
        (cell_of,) = Results.read(ledger).cells
    assert cell_of.search.found_in == ("rung-1",)


def test_the_contest_is_among_the_last_rung(tmp_path):
    of = study(methods=[GD], seeds={"search": [1, 2], "contest": [11, 12]}, search={**HALVING, "finalists": 8})
    ran = drive(tmp_path, of, near(0.3))
    met = {t.hyperparameters["learning_rate"] for t in ran.of("DP-FedGD", "contest", "halving")}
    assert met == {t.hyperparameters["learning_rate"] for t in climbed(ran, "rung-3")[0]}


def test_a_ladder_ends_where_nothing_is_left(tmp_path):
    ran = drive(tmp_path, study(methods=[GD], search=HALVING), lambda trial: ("diverged", None, None))
    assert ran.finished
    assert [bool(rung) for rung in climbed(ran)] == [True, False, False]
    assert ran.choices == {cell("DP-FedGD"): None}
    assert status.read(tmp_path)["finished"]


def test_whoever_leads_leads_its_rung(tmp_path):
    """After more rounds scores are others: what shone below does not count above."""
    heard = RunningBest(ACCURACY, [*RUNG, "contest"])
    for stage, score in (("rung-1", 80.0), ("rung-2", 60.0), ("rung-2", 50.0)):
        heard.add(stage, int(score), 1, ("done", score, 1.0))
    assert heard.score == 60.0


# ---- how good a search is


def test_regret_is_measured_against_the_best_evaluated_configuration(tmp_path, capsys):
    """Three learning rates, of which one hardly learns: both rules choose, and no regret is below zero."""
    space = {"coarse": {"learning_rate": [1e-6, 0.1, 1]}, "fine": {"learning_rate": [0.1]}}
    regret.main(
        [
            *("--data", "synthetic-frozen:300,200,6,3", "--clients", "3", "--partition", "iid"),
            *("--methods", "dp-fedgd", "--epsilons", "40", "--refine", "table", "--space", json.dumps(space)),
            *("--repetitions", "2", "--search-seeds", "2", "--contest-seeds", "2", "--evaluation-seeds", "2"),
            *("--json", str(tmp_path / "found.json")),
        ]
    )
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert found["evaluated"] == 3
    assert set(found["strategies"]) == {"grid", "grid single"}
    assert found["best"]["configuration"]["learning_rate"] in (0.1, 1.0)
    # three configurations, one of them in both grids; two seeds, or one; two contest seeds of 70 rounds
    assert found["strategies"]["grid single"]["trial_rounds"] == 3 * 50
    assert found["strategies"]["grid"]["trial_rounds"] == 2 * 3 * 50 + 3 * 2 * 70
    for strategy in found["strategies"].values():
        assert 0 <= strategy["mean"] <= strategy["p95"] <= strategy["worst"] < found["best"]["mean"]
    assert "| synthetic-frozen:300,200,6,3, dp-fedgd, 40 |" in capsys.readouterr().out


# ---- very many trials


def test_a_plan_for_a_cluster():
    """By its nodes, and by its GPUs where it has some."""
    one, two = (plan(study(), [{"CPU": 4.0}] * count) for count in (1, 2))
    assert (one.federations, two.federations, two.where) == (1, 2, "a cluster of 2 nodes")
    gpus = plan(study(resources={"gpus_per_host": 1}), [{"CPU": 16.0, "GPU": 8.0}] * 8)
    assert (gpus.federations, gpus.device) == (64, "cuda")
    assert "on a cluster of 8 nodes: 64 federation(s) of 1 client host(s) on GPUs, about" in gpus.as_text()


def test_planning_makes_a_trial_a_few_times_at_most(monkeypatch):
    """However many there are: nothing grows with their square."""
    made = []
    plain = Cell.trials
    monkeypatch.setattr(Cell, "trials", lambda *given, **more: (made.append(1), plain(*given, **more))[1])
    axes = {"learning_rate": [0.001 * (k + 1) for k in range(100)], "rho": [1 + k for k in range(10)], "beta": [0.9]}
    method = {"name": "dp-fedsofim", "coarse": axes, "fine": {**axes, "rho": [21 + k for k in range(10)]}}
    planned = plan(study(methods=[method]))
    assert planned.trials == {"coarse": 1000, "fine": 1000, "confirm": 2}
    assert len(made) < 4 * 2002
