"""Who wins at the margins, and what a private search draws from its secret."""

import private_study as private
import pytest
from simulated_search import DATA, GD, drive, near, row, study

from orchestrator.execution.cell_search import CellSearch
from orchestrator.execution.sweep import Sweep, without_retryable_failures
from orchestrator.results.ledger import Ledger
from orchestrator.search.candidates import Candidate, candidates_of, mean, mean_score, paired_difference, spread
from orchestrator.search.expected_trials import trials_to_come
from orchestrator.search.history import History
from orchestrator.search.objective import ACCURACY, SQUARED_ERROR
from orchestrator.search.ranges import sample
from orchestrator.search.running_best import RunningBest
from orchestrator.search.selection import choose, clearly_differ, win_contest
from orchestrator.search.strategies.grid import _neighbours
from orchestrator.search.strategies.private import Private, noisy_best
from orchestrator.search.winner import winner as find_winner
from orchestrator.study.cells import Blueprint
from search_spaces import load


def judged(*rows: tuple[float | None, ...]):
    """Contenders with these scores, seed by seed; None: that trial diverged."""
    outcomes, contenders = {}, []
    for place, scores in enumerate(rows):
        keys = tuple(f"{place}/{seed}" for seed in range(len(scores)))
        contenders.append(Candidate(keys))
        for key, score in zip(keys, scores, strict=True):
            outcomes[key] = ("diverged", None, None) if score is None else ("done", score, 1.0)
    return contenders, outcomes


# ---- contenders


def test_the_first_trial_stands_for_a_configuration():
    (one, two) = candidates_of(["a", "b", "c", "d"], 2)
    assert (one.key, two.key, one.keys) == ("a", "c", ("a", "b"))
    assert candidates_of([], 0) == []


def test_a_single_value_has_a_mean_and_no_spread():
    assert (mean([0.1]), spread([0.1])) == (0.1, 0.0)
    assert (mean([1.0, 3.0]), spread([1.0, 3.0])) == (2.0, pytest.approx(2**0.5))


def test_differences_are_paired_over_the_seeds_that_both_have():
    """1 and 3 apart: 2 on average, with a standard error of sqrt(2) / sqrt(2)."""
    assert paired_difference([10.0, None, 20.0, 5.0], [9.0, 3.0, 17.0, None]) == pytest.approx((2.0, 1.0))
    assert paired_difference([None, 1.0], [1.0, None]) is None


# ---- who wins


@pytest.mark.parametrize(("other", "tied"), [((50.0, 58.0), 2), ((52.0, 57.0), 2), ((49.0, 58.0), 1)])
def test_within_one_standard_error_is_tied_and_just_so(other, tied):
    """50, 60 against it: 0 and 2 apart are 1 on average with an error of 1; -2 and 3 are 0.5 with 2.5; 1 and 2 are 1.5
    with 0.5."""
    contenders, outcomes = judged((50.0, 60.0), other)
    assert choose(contenders, outcomes, 100).within_standard_error == tied
    assert win_contest(contenders, outcomes).within_standard_error == tied


@pytest.mark.parametrize(("theirs", "apart"), [(41.0, False), (39.0, True), (None, True)])
def test_single_seeds_are_told_apart_by_their_rows(theirs, apart):
    """50% of 100 rows is good to 5, twice that is 10."""
    (ours, other), outcomes = judged((50.0,), (theirs,))
    assert clearly_differ(ours, other, outcomes, 100) is apart


def test_several_seeds_are_told_apart_by_their_differences():
    """4 and 6 apart: 5 with an error of 1. 1 and 9: 5 with an error of 4."""
    (ours, clear, unclear), outcomes = judged((50.0, 60.0), (46.0, 54.0), (49.0, 51.0))
    assert clearly_differ(ours, clear, outcomes, 100)
    assert not clearly_differ(ours, unclear, outcomes, 100)


def test_an_error_has_no_standard_error_of_one_seed():
    (ours, other), outcomes = judged((1.0,), (1.5,))
    assert clearly_differ(ours, other, outcomes, 100, SQUARED_ERROR)
    assert choose([ours, other], outcomes, 100, SQUARED_ERROR).within_standard_error is None


def test_who_leads_before_all_has_ended():
    contenders, outcomes = judged((50.0,), (60.0,), (70.0,))
    del outcomes["2/0"]
    of = study(methods=[GD], seeds={"search": [1], "contest": [2]})
    (variant,) = of.variants

    def winner(**stages):
        keys = {stage: [c.key for c in some] for stage, some in stages.items()}
        task = of.search_task(of.methods[0], 8, variant, 10)
        return find_winner(variant, History(task, variant.seeds, outcomes, keys))

    assert winner(coarse=contenders).key == "1/0"
    assert winner(coarse=contenders, contest=contenders[:1]).key == "0/0", "of those that met again"
    assert winner(coarse=contenders[2:]) is None


# ---- how much is to come


def test_what_is_yet_to_open_is_what_is_not_open():
    """GD has 3 coarse and 4 fine configurations, of which 0.1 is in both; two seeds in confirm."""
    of = study(methods=[GD])
    (variant,) = of.variants
    task = of.search_task(of.methods[0], 8, variant, 10)

    def yet_to_open(opened):
        return trials_to_come(variant, task, 8, opened, of.variants)

    assert yet_to_open({}) == {"coarse": 3, "fine": 3, "confirm": 2}
    assert yet_to_open({"coarse": 3}) == {"fine": 3, "confirm": 2}
    assert yet_to_open({"coarse": 3, "fine": 4}) == {"confirm": 2}
    assert yet_to_open({"coarse": 3, "fine": 4, "confirm": 2}) == {}


@pytest.mark.parametrize(
    ("search", "exact"), [({}, True), ({"refine": "zoom"}, False), ({"strategies": ["optuna"]}, False)]
)
def test_only_grids_of_a_table_are_known_beforehand(search, exact):
    assert study(search=search).trials_are_exact is exact
    assert not study(search={"strategies": ["grid", "optuna"]}).trials_are_exact


# ---- a private search


def drawn_from(cell, secret: bytes) -> list[tuple[float, int]]:
    """Learning rate and seed of every run."""
    (variant,) = cell.study.variants
    task = cell.study.search_task(cell.method, cell.epsilon, variant, 10, secret)
    _, configurations, seeds = Private().propose(task, History(task, variant.seeds, {}))
    return [(c["learning_rate"], seed) for c, seed in zip(configurations, seeds, strict=True)]


def test_what_is_drawn_from_a_secret_is_pinned():
    """A search that was interrupted goes on with the same runs, whatever the program has become meanwhile."""
    cell = Blueprint.draw(private.study()).cells[0]
    found = drawn_from(cell, private.SECRET)
    assert [rate for rate, _ in found] == [0.01, 0.01, 0.5, 1.0, 0.01, 0.5, 0.01]
    assert found[0][1] == 6762732775533463137
    assert found[-1][1] == 7514469603514694182
    assert max(seed for _, seed in found) < 2**63
    assert noisy_best({"a": 5}, {"a": ("done", 50.0, 1.0)}, 1.0).score == pytest.approx(48.29090487957001, rel=1e-6)


def test_a_private_search_runs_what_its_secret_says_and_then_the_winner_itself(tmp_path):
    of = study(methods=[GD], data=[{"source": DATA, "label": "toy"}], search={"strategies": ["private"], "trials": 6})
    ran = drive(tmp_path, of, near(1.0))
    searched = ran.of("DP-FedGD", "private", strategy="private")
    (confirmed,) = ran.of("DP-FedGD", "confirm", strategy="private")
    with Ledger.write(tmp_path) as ledger:
        sweep = Sweep(blueprint := Blueprint.draw(of), ledger)
        (cell,) = blueprint.cells
        drawn = drawn_from(cell, ledger.secret(cell.id))
        (search,) = sweep.searches
        assert (sweep.finished, sweep.running, sweep.left(search)) == (True, 0, 0)
    assert [(trial.hyperparameters["learning_rate"], trial.seed) for trial in searched] == drawn
    assert (confirmed.hyperparameters, confirmed.seed) in [(trial.hyperparameters, trial.seed) for trial in searched]
    assert (searched[0].problem.evaluate_on, confirmed.problem.evaluate_on) == ("validation", "test")


def test_the_lead_is_kept_as_trials_end():
    """A configuration counts once all its seeds have ended, and only if none was lost; a contest begins anew, however
    low its first results are."""
    lead = RunningBest(ACCURACY, ["contest"])
    lead.add("coarse", 0, 2, ("done", 60.0, 1.0))
    assert lead.score is None
    lead.add("coarse", 1, 2, ("done", 90.0, 1.0))
    lead.add("coarse", 1, 2, ("diverged", None, None))
    assert lead.score is None
    lead.add("coarse", 0, 2, ("done", 62.0, 1.0))
    assert lead.score == 61.0
    lead.add("fine", 0, 1, ("done", 50.0, 1.0))
    assert lead.score == 61.0
    lead.add("contest", 0, 1, ("done", 40.0, 1.0))
    assert lead.score == 40.0
    lead.add("confirm", 0, 1, ("done", 99.0, 1.0))
    assert lead.score == 40.0
    assert not lead._partial


@pytest.mark.parametrize("contest", [[], [3, 4]])
def test_the_lead_of_a_sweep_is_the_best_mean(tmp_path, contest):
    """Heard one by one, or found in a ledger: it comes to the same."""
    of = study(seeds={"search": [1, 2], "contest": contest})
    stages = ("contest",) if contest else ("coarse", "fine")
    for _ in range(2):
        with Ledger.write(tmp_path) as ledger:
            sweep = Sweep(Blueprint.draw(of), ledger)
            while not sweep.finished:
                some = list(sweep.waiting.values())[:5]
                rows = [row(trial, near(0.3)(trial)) for trial in some]
                ledger.add(rows)
                sweep.ended({r.key: (r.state, r.accuracy, r.loss) for r in rows})
        for search in sweep.searches:
            met = search.history.candidates(*stages)
            assert search.best.score == max(mean(contender.scores(sweep.outcomes)) for contender in met)


SEEDS = {"search": [1], "contest": [2]}


@pytest.mark.parametrize("warm", [False, True])
def test_which_failures_are_final(warm):
    """Those on which a later stage was built, whichever it is; with warm starts a contest is built on the searches of
    all cells of its way, and of no other way."""
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
    kept = without_retryable_failures(outcomes, stages, variants, warm_start=warm)
    of_others = {"b fine"} if warm else set()
    assert set(kept) == {"done", "a coarse", "shared", "b coarse", "e drawn", *of_others}


# ---- at the margins of the rules


def test_twice_the_noise_is_no_difference_yet():
    """50% of 100 rows is good to 5: ten apart are just twice that."""
    (ours, other), outcomes = judged((50.0,), (40.0,))
    assert not clearly_differ(ours, other, outcomes, 100)
    (ours, same), outcomes = judged((1.5,), (1.5,))
    assert not clearly_differ(ours, same, outcomes, 100, SQUARED_ERROR), "where no noise is known, equals are equal"


def test_one_that_was_lost_on_a_seed_is_another_however_it_did_on_the_rest():
    (ours, lost), outcomes = judged((50.0, 60.0), (50.0, None))
    assert clearly_differ(ours, lost, outcomes, 100)
    assert choose([ours, lost], outcomes, 100).within_standard_error == 1
    assert win_contest([ours, lost], outcomes).within_standard_error == 1


def test_only_what_ran_to_its_end_has_a_score():
    assert mean_score([("done", 50.0, 1.0), ("diverged", 10.0, 1.0)]) == 50.0
    assert paired_difference([1.0, 2.0], [1.0]) == (0.0, 0.0), "seeds that one of them does not have yet"


def test_what_is_to_come_by_way_and_seed():
    """GD has 3 coarse and 4 fine configurations, one of them in both."""
    seeds = {"search": [1, 2], "contest": [11, 12, 13], "confirm": [21]}

    def to_come(strategy, **search):
        of = study(methods=[GD], seeds=seeds, search={"select": ["contest", "single"], "finalists": 100, **search})
        variant = of.variants[strategy]
        return trials_to_come(variant, of.search_task(of.methods[0], 8, variant, 10), 100, {}, of.variants)

    assert to_come(0) == {"coarse": 6, "fine": 6, "contest": 21, "confirm": 1}
    assert to_come(1) == {"coarse": 3, "confirm": 1}, "its fine trials are the other's"
    assert to_come(1, refine="zoom")["fine"] > 0, "around another winner, perhaps"


def test_grids_of_other_rounds_share_nothing():
    of = study(methods=[GD], rounds={"coarse": 3, "fine": 4, "confirm": 6})
    (variant,) = of.variants
    task = of.search_task(of.methods[0], 8, variant, 10)

    def yet_to_open(opened):
        return trials_to_come(variant, task, 8, opened, of.variants)

    assert yet_to_open({})["fine"] == 4


@pytest.mark.parametrize(
    ("search", "grows"),
    [
        ({}, False),
        ({"refine": "zoom"}, True),
        ({"strategies": ["optuna"], "refine": "zoom"}, False),
        ({"strategies": ["optuna"]}, False),
    ],
)
def test_only_a_grid_that_zooms_may_grow(search, grows):
    assert study(search=search).may_add_stages is grows


def test_beside_a_winner_are_those_below_and_above(tmp_path):
    of = study(methods=[GD])
    (cell,), (variant,) = Blueprint.draw(of).cells, of.variants
    search = CellSearch(cell, variant, {}, 100)
    search.open(*search.next_stage())
    history = search.history

    def beside(candidate):
        return _neighbours(search.task, history, candidate, "learning_rate", [high, low, middle])

    low, middle, high = sorted(history.candidates("coarse"), key=lambda c: history.configuration(c)["learning_rate"])
    assert beside(middle) == [low, high]
    assert beside(low) == [middle]


def test_draws_follow_the_scale_of_an_axis():
    """Half of them lie below the middle of the scale: ten of 1 to 100, and 1 - 0.1 of 1 - 0.01 to 1 - 1."""
    space = load("dp-fedavg").with_overrides(
        fixed={}, coarse={"local_steps": [1, 100]}, fine={"local_steps": [1, 100]}, scale={"local_steps": "log"}
    )
    steps = [c["local_steps"] for c in sample(space, 200, 0)]
    assert all(isinstance(step, int) and 1 <= step <= 100 for step in steps)
    assert 60 < sum(step <= 10 for step in steps) < 140
    beta = {"beta": [0.0, 0.99]}
    space = load("dp-fedsofim").with_overrides(fixed={}, coarse=beta, fine=beta, scale={"beta": "complement"})
    assert 60 < sum(c["beta"] >= 0.9 for c in sample(space, 200, 0)) < 140


def test_a_private_winner_has_no_spread_and_has_lost_nothing():
    found = noisy_best({"a": 5}, {"a": ("done", 50.0, 1.0)}, 1.0)
    assert (found.spread, found.failed) == (0.0, 0)
