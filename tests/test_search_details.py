"""Edge cases of selection, and what a private search draws from its secret."""

import private_study as private
import pytest
from simulated_search import DATA, GD, drive, near, row, study

from orchestrator.execution.cell_search import CellSearch
from orchestrator.execution.sweep import Sweep, without_retryable_failures
from orchestrator.results.ledger import Ledger
from orchestrator.search.candidates import Candidate, candidates_of, mean, mean_score, paired_difference, spread
from orchestrator.search.expected_trials import trials_to_come
from orchestrator.search.history import History
from orchestrator.search.objective import ACCURACY, objective_of
from orchestrator.search.ranges import sample
from orchestrator.search.running_best import RunningBest
from orchestrator.search.selection import choose, clearly_differ, win_contest
from orchestrator.search.strategies.grid import _neighbours
from orchestrator.search.strategies.private import Private, noisy_best
from orchestrator.search.winner import winner as find_winner
from orchestrator.study.cells import PreparedStudy
from search_spaces import load


def scored(*rows: tuple[float | None, ...]):
    """Candidates with their scores for every seed (None: diverged)."""
    outcomes, candidates = {}, []
    for index, scores in enumerate(rows):
        keys = tuple(f"{index}/{seed}" for seed in range(len(scores)))
        candidates.append(Candidate(keys))
        for key, score in zip(keys, scores, strict=True):
            outcomes[key] = ("diverged", None, None) if score is None else ("done", score, 1.0)
    return candidates, outcomes


# ---- candidates


def test_a_candidate_has_the_key_of_its_first_trial():
    (first, second) = candidates_of(["a", "b", "c", "d"], 2)
    assert (first.key, second.key, first.keys) == ("a", "c", ("a", "b"))
    assert candidates_of([], 0) == []


def test_the_spread_of_a_single_value_is_zero():
    assert (mean([0.1]), spread([0.1])) == (0.1, 0.0)
    assert (mean([1.0, 3.0]), spread([1.0, 3.0])) == (2.0, pytest.approx(2**0.5))


def test_differences_are_paired_over_common_seeds():
    """Differences of 1 and 3: mean 2, standard error sqrt(2) / sqrt(2)."""
    assert paired_difference([10.0, None, 20.0, 5.0], [9.0, 3.0, 17.0, None]) == pytest.approx((2.0, 1.0))
    assert paired_difference([None, 1.0], [1.0, None]) is None


# ---- selection


@pytest.mark.parametrize(("other", "tied"), [((50.0, 58.0), 2), ((52.0, 57.0), 2), ((49.0, 58.0), 1)])
def test_candidates_within_one_standard_error_tie(other, tied):
    """Differences from (50, 60): 0 and 2 have mean 1 and error 1; -2 and 3 have 0.5 and 2.5; 1 and 2 have 1.5 and
    0.5."""
    candidates, outcomes = scored((50.0, 60.0), other)
    assert choose(candidates, outcomes, 100).within_standard_error == tied
    assert win_contest(candidates, outcomes).within_standard_error == tied


@pytest.mark.parametrize(("other_score", "differs"), [(41.0, False), (39.0, True), (None, True)])
def test_with_one_seed_the_number_of_rows_decides_what_differs(other_score, differs):
    """50% of 100 rows has a standard error of 5; the threshold is twice that, 10."""
    (ours, other), outcomes = scored((50.0,), (other_score,))
    assert clearly_differ(ours, other, outcomes, 100) is differs


def test_with_several_seeds_the_paired_differences_decide():
    """Differences of 4 and 6: mean 5, error 1. Differences of 1 and 9: mean 5, error 4."""
    (ours, clear, unclear), outcomes = scored((50.0, 60.0), (46.0, 54.0), (49.0, 51.0))
    assert clearly_differ(ours, clear, outcomes, 100)
    assert not clearly_differ(ours, unclear, outcomes, 100)


def test_an_error_metric_has_no_standard_error_for_one_seed():
    (ours, other), outcomes = scored((1.0,), (1.5,))
    assert clearly_differ(ours, other, outcomes, 100, objective_of("squared_error"))
    assert choose([ours, other], outcomes, 100, objective_of("squared_error")).within_standard_error is None


def test_the_winner_before_all_trials_have_ended():
    candidates, outcomes = scored((50.0,), (60.0,), (70.0,))
    del outcomes["2/0"]
    of = study(methods=[GD], seeds={"search": [1], "contest": [2]})
    (variant,) = of.variants

    def winner(**stages):
        keys = {stage: [c.key for c in members] for stage, members in stages.items()}
        task = of.search_task(of.methods[0], 8, variant, 10)
        return find_winner(variant, History(task, variant.seeds, outcomes, keys))

    assert winner(coarse=candidates).key == "1/0"
    assert winner(coarse=candidates, contest=candidates[:1]).key == "0/0", "only contest candidates count"
    assert winner(coarse=candidates[2:]) is None


# ---- expected trials


def test_trials_to_come_exclude_open_stages():
    """GD has 3 coarse and 4 fine configurations (0.1 is in both) and two confirm seeds."""
    of = study(methods=[GD])
    (variant,) = of.variants
    task = of.search_task(of.methods[0], 8, variant, 10)

    def to_come(opened):
        return trials_to_come(variant, task, 8, opened, of.variants)

    assert to_come({}) == {"coarse": 3, "fine": 3, "confirm": 2}
    assert to_come({"coarse": 3}) == {"fine": 3, "confirm": 2}
    assert to_come({"coarse": 3, "fine": 4}) == {"confirm": 2}
    assert to_come({"coarse": 3, "fine": 4, "confirm": 2}) == {}


@pytest.mark.parametrize(
    ("search", "exact"), [({}, True), ({"refine": "zoom"}, False), ({"strategies": ["optuna"]}, False)]
)
def test_trial_counts_are_exact_only_for_table_grids(search, exact):
    assert study(search=search).trials_are_exact is exact
    assert not study(search={"strategies": ["grid", "optuna"]}).trials_are_exact


# ---- a private search


def drawn_from(cell, secret: bytes) -> list[tuple[float, int]]:
    """The learning rate and seed of every run."""
    (variant,) = cell.study.variants
    task = cell.study.search_task(cell.method, cell.epsilon, variant, 10, secret)
    _, configurations, seeds = Private().propose(task, History(task, variant.seeds, {}))
    return [(c["learning_rate"], seed) for c, seed in zip(configurations, seeds, strict=True)]


def test_draws_from_a_secret_are_stable():
    """An interrupted search resumes with the same runs, even under a later version of the program."""
    cell = PreparedStudy.prepare(private.study()).cells[0]
    draws = drawn_from(cell, private.SECRET)
    assert [rate for rate, _ in draws] == [0.01, 0.01, 0.5, 1.0, 0.01, 0.5, 0.01]
    assert draws[0][1] == 6762732775533463137
    assert draws[-1][1] == 7514469603514694182
    assert max(seed for _, seed in draws) < 2**63
    assert noisy_best({"a": 5}, {"a": ("done", 50.0, 1.0)}, 1.0).score == pytest.approx(48.29090487957001, rel=1e-6)


def test_a_private_search_runs_the_draws_of_its_secret_and_confirms_the_winner(tmp_path):
    of = study(methods=[GD], data=[{"source": DATA, "label": "toy"}], search={"strategies": ["private"], "trials": 6})
    ran = drive(tmp_path, of, near(1.0))
    searched = ran.of("DP-FedGD", "private", strategy="private")
    (confirmed,) = ran.of("DP-FedGD", "confirm", strategy="private")
    with Ledger.write(tmp_path) as ledger:
        sweep = Sweep(prepared := PreparedStudy.prepare(of), ledger)
        (cell,) = prepared.cells
        drawn = drawn_from(cell, ledger.secret(cell.id, "").value)
        (search,) = sweep.searches
        assert (sweep.finished, sweep.unfinished, sweep.left(search)) == (True, 0, 0)
    assert [(trial.hyperparameters["learning_rate"], trial.seed) for trial in searched] == drawn
    assert (confirmed.hyperparameters, confirmed.seed) in [(trial.hyperparameters, trial.seed) for trial in searched]
    assert (searched[0].problem.evaluate_on, confirmed.problem.evaluate_on) == ("validation", "test")


def test_the_running_best_is_updated_as_trials_end():
    """A configuration counts once all its seeds have ended and none diverged. A contest restarts the ranking, even if
    its first results are lower."""
    running_best = RunningBest(ACCURACY, ["contest"])
    running_best.add("coarse", 0, 2, ("done", 60.0, 1.0))
    assert running_best.score is None
    running_best.add("coarse", 1, 2, ("done", 90.0, 1.0))
    running_best.add("coarse", 1, 2, ("diverged", None, None))
    assert running_best.score is None
    running_best.add("coarse", 0, 2, ("done", 62.0, 1.0))
    assert running_best.score == 61.0
    running_best.add("fine", 0, 1, ("done", 50.0, 1.0))
    assert running_best.score == 61.0
    running_best.add("contest", 0, 1, ("done", 40.0, 1.0))
    assert running_best.score == 40.0
    running_best.add("confirm", 0, 1, ("done", 99.0, 1.0))
    assert running_best.score == 40.0
    assert not running_best._partial


@pytest.mark.parametrize("contest", [[], [3, 4]])
def test_the_running_best_of_a_sweep_is_the_best_mean(tmp_path, contest):
    """The result is the same for live results and for results read from a ledger."""
    of = study(seeds={"search": [1, 2], "contest": contest})
    stages = ("contest",) if contest else ("coarse", "fine")
    for _ in range(2):
        with Ledger.write(tmp_path) as ledger:
            sweep = Sweep(PreparedStudy.prepare(of), ledger)
            while not sweep.finished:
                batch = list(sweep.waiting.values())[:5]
                rows = [row(trial, near(0.3)(trial)) for trial in batch]
                ledger.add(rows)
                sweep.ended({r.key: (r.state, r.accuracy, r.loss) for r in rows})
        for search in sweep.searches:
            candidates = search.history.candidates(*stages)
            assert search.best.score == max(mean(candidate.scores(sweep.outcomes)) for candidate in candidates)


SEEDS = {"search": [1], "contest": [2]}


@pytest.mark.parametrize("warm", [False, True])
def test_which_failures_are_final(warm):
    """A failure is final if a later stage depends on it. With warm starts a contest depends on the searches of all
    cells of the same variant, and of no other variant."""
    stages = {
        ("a", "grid", "coarse"): ["a coarse", "shared"],
        ("a", "grid", "contest"): ["a contest"],
        ("b", "grid", "coarse"): ["b coarse"],
        ("b", "grid", "fine"): ["b fine"],
        ("c", "grid single", "coarse"): ["c coarse"],
        ("d", "grid", "confirm"): ["d confirm"],
        ("e", "optuna", "optuna"): ["e drawn"],
    }
    failed = {key: ("failed", None, None) for keys in stages.values() for key in keys}
    variants = study(search={"strategies": ["grid", "optuna"], "select": ["contest", "single"]}, seeds=SEEDS).variants
    outcomes = {**failed, "done": ("done", 50.0, 1.0)}
    final = without_retryable_failures(outcomes, stages, variants, warm_start=warm)
    of_other_cells = {"b fine"} if warm else set()
    assert set(final) == {"done", "a coarse", "shared", "b coarse", "e drawn", *of_other_cells}


# ---- edge cases of the rules


def test_a_difference_of_exactly_two_standard_errors_is_not_clear():
    """50% of 100 rows has a standard error of 5, and the difference is 10."""
    (ours, other), outcomes = scored((50.0,), (40.0,))
    assert not clearly_differ(ours, other, outcomes, 100)
    (ours, same), outcomes = scored((1.5,), (1.5,))
    assert not clearly_differ(ours, same, outcomes, 100, objective_of("squared_error")), (
        "without a standard error, equal scores do not differ"
    )


def test_a_candidate_that_diverged_on_one_seed_always_differs():
    (ours, diverged), outcomes = scored((50.0, 60.0), (50.0, None))
    assert clearly_differ(ours, diverged, outcomes, 100)
    assert choose([ours, diverged], outcomes, 100).within_standard_error == 1
    assert win_contest([ours, diverged], outcomes).within_standard_error == 1


def test_only_finished_trials_have_a_score():
    assert mean_score([("done", 50.0, 1.0), ("diverged", 10.0, 1.0)]) == 50.0
    assert paired_difference([1.0, 2.0], [1.0]) == (0.0, 0.0), "missing seeds are ignored"


def test_trials_to_come_by_strategy_and_seed():
    """GD has 3 coarse and 4 fine configurations, one of them in both."""
    seeds = {"search": [1, 2], "contest": [11, 12, 13], "confirm": [21]}

    def to_come(variant_index, **search):
        of = study(methods=[GD], seeds=seeds, search={"select": ["contest", "single"], "finalists": 100, **search})
        variant = of.variants[variant_index]
        return trials_to_come(variant, of.search_task(of.methods[0], 8, variant, 10), 100, {}, of.variants)

    assert to_come(0) == {"coarse": 6, "fine": 6, "contest": 21, "confirm": 1}
    assert to_come(1) == {"confirm": 1}, "it shares the trials of the contest variant's grids"
    assert to_come(1, refine="zoom")["fine"] > 0, "it may zoom around another winner"


def test_grids_with_different_rounds_share_no_trials():
    of = study(methods=[GD], rounds={"coarse": 3, "fine": 4, "confirm": 6})
    (variant,) = of.variants
    task = of.search_task(of.methods[0], 8, variant, 10)

    def to_come(opened):
        return trials_to_come(variant, task, 8, opened, of.variants)

    assert to_come({})["fine"] == 4


def test_selection_rules_share_trials_of_grids_with_different_rounds():
    of = study(methods=[GD], rounds={"coarse": 3, "fine": 4, "confirm": 6}, search={"select": ["contest", "single"]})
    single = of.variants[1]
    task = of.search_task(of.methods[0], 8, single, 10)
    assert trials_to_come(single, task, 8, {}, of.variants) == {"confirm": 2}


@pytest.mark.parametrize(
    ("search", "grows"),
    [
        ({}, False),
        ({"refine": "zoom"}, True),
        ({"strategies": ["optuna"], "refine": "zoom"}, False),
        ({"strategies": ["optuna"]}, False),
    ],
)
def test_only_a_zooming_grid_may_add_stages(search, grows):
    assert study(search=search).may_add_stages is grows


def test_the_neighbours_of_a_winner_are_those_below_and_above(tmp_path):
    of = study(methods=[GD])
    (cell,), (variant,) = PreparedStudy.prepare(of).cells, of.variants
    search = CellSearch(cell, variant, {}, 100)
    search.open(*search.next_stage())
    history = search.history

    def neighbours(candidate):
        return _neighbours(search.task, history, candidate, "learning_rate", [high, low, middle])

    low, middle, high = sorted(history.candidates("coarse"), key=lambda c: history.configuration(c)["learning_rate"])
    assert neighbours(middle) == [low, high]
    assert neighbours(low) == [middle]


def test_draws_follow_the_scale_of_an_axis():
    """About half of the draws lie on each side of the scale's middle: 10 for 1 to 100, and 0.9 for 0 to 0.99."""
    space = load("dp-fedavg").with_overrides(
        fixed={}, coarse={"local_steps": [1, 100]}, fine={"local_steps": [1, 100]}, scale={"local_steps": "log"}
    )
    steps = [c["local_steps"] for c in sample(space, 200, 0)]
    assert all(isinstance(step, int) and 1 <= step <= 100 for step in steps)
    assert 60 < sum(step <= 10 for step in steps) < 140
    beta = {"beta": [0.0, 0.99]}
    space = load("dp-fedsofim").with_overrides(fixed={}, coarse=beta, fine=beta, scale={"beta": "complement"})
    assert 60 < sum(c["beta"] >= 0.9 for c in sample(space, 200, 0)) < 140


def test_a_private_winner_has_no_spread_and_no_failures():
    winner = noisy_best({"a": 5}, {"a": ("done", 50.0, 1.0)}, 1.0)
    assert (winner.spread, winner.failed) == (0.0, 0)
