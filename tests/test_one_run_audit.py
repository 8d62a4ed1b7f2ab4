"""The audit in one run: its bound, its guesses, and that it catches what it says it would."""

import math

import mpmath
import numpy as np
import pytest
import small
from scipy.special import expit, logit

from trainables.audit.one_run import (
    FACTORS,
    Planted,
    at_least,
    chance,
    guesses_for,
    least_caught,
    needed,
    one_run_audit,
    room_for,
)
from trainables.errors import UserError

DATA = "synthetic-frozen:2000,100,30,4"


@pytest.fixture(scope="module")
def problem():
    return small.problem(DATA)


def trial(problem, method="dp-fedgd", **settings):
    return small.trial(problem, method, **{"rounds": 6, "epsilon": 1.0, **settings})


# ---- the bound


def by_the_theorem(m, r, v, epsilon, delta):
    """With B the coins that fall right: P[B >= v] + 2 m delta max_i P[v - i <= B < v] / i, in fifty digits."""
    with mpmath.workdps(50):
        coin = 1 / (1 + mpmath.exp(-epsilon))
        mass = [mpmath.binomial(r, k) * coin**k * (1 - coin) ** (r - k) for k in range(r + 1)]
        just_below = [mpmath.fsum(mass[v - i : v]) / i for i in range(1, v + 1)]
        return float(min(1, mpmath.fsum(mass[v:]) + 2 * m * delta * max(just_below, default=0)))


@pytest.mark.parametrize(("m", "r", "v"), [(100, 50, 40), (1000, 100, 97), (1000, 1000, 600), (20, 10, 0)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (1.0, 1e-5), (4.0, 1e-3)])
def test_the_bound_is_the_papers(m, r, v, epsilon, delta):
    assert chance(m, r, v, epsilon, delta) == pytest.approx(
        by_the_theorem(m, r, v, epsilon, delta), rel=1e-9, abs=1e-300
    )


def test_all_guesses_right():
    """Pure: r coins all right at chance 5% means q = 0.05^(1/r); eps = log(q / (1 - q))."""
    assert at_least(100, 100, 100, 0.0) == pytest.approx(logit(0.05**0.01), abs=1e-6)
    assert at_least(100, 100, 50, 0.0) == 0
    assert at_least(100, 100, 100, 1e-5) < at_least(100, 100, 100, 0.0)


def test_the_bound_is_exceeded_no_more_often_than_it_says():
    """Randomised response, the worst that is eps-DP: in 2,000 audits at most one in twenty may go beyond its eps."""
    right = np.random.default_rng(1).binomial(200, expit(1.0), 2000)
    beyond = np.mean(right >= needed(1.0, 0.0, 200, 200))
    assert 0.01 < beyond <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 2000)


def test_what_is_needed_is_what_exceeds_the_claim():
    enough = needed(1.0, 1e-5, 500, 200)
    assert at_least(500, 200, enough, 1e-5) >= 1.0 > at_least(500, 200, enough - 1, 1e-5)
    assert needed(10.0, 1e-5, 500, 200) == 201  # no number of right guesses suffices
    assert least_caught(10.0, 1e-5, 500, 200) == math.inf
    assert guesses_for(10.0, 1e-5, 500) == 500
    assert least_caught(1.0, 1e-5, 1000, 100) < least_caught(1.0, 1e-5, 100, 50)


# ---- the audit


@pytest.mark.parametrize("settings", [{}, {"adjacency": "zero-out"}, {"release": "secure-aggregation"}])
def test_honest_noise_passes_and_a_twentieth_is_caught(problem, settings):
    """Under secure aggregation fewer canaries can be told apart, so less is caught."""
    tried = trial(problem, **settings)
    honest = one_run_audit(tried, problem)
    assert not honest.caught
    assert honest.epsilon <= honest.plan.actual_epsilon[tried.privacy.release]
    assert honest.canaries == room_for(tried, problem)
    assert honest.noise in FACTORS
    assert honest.noise >= (0.02 if settings.get("release") else 0.05)
    weak = one_run_audit(tried, problem, noise_factor=honest.noise / 2)
    assert weak.caught
    assert weak.epsilon > 1 > honest.epsilon


@pytest.mark.parametrize("method", ["dp-fedavg", "dp-scaffold", "dp-ftrl", "dp-fedsofim", "dp-fedfc"])
def test_other_methods_are_audited_as_they_are(problem, method):
    """Local steps, control variates and trees: the releases are heard through the clients' own programs."""
    tried = trial(problem, method)
    assert not one_run_audit(tried, problem, canaries=200).caught
    assert one_run_audit(tried, problem, canaries=200, noise_factor=0.02).caught


def test_centred_and_weighted_runs_are_audited_as_they_are(problem):
    tried = trial(problem)
    tried = tried.model_copy(
        update={"aggregate": "size", "preprocess": tried.preprocess.model_copy(update={"center": 0.05})}
    )
    assert not one_run_audit(tried, problem, canaries=200).caught
    assert one_run_audit(tried, problem, canaries=200, noise_factor=0.02).caught


def test_canaries_change_nothing_but_their_rows(problem):
    planted = Planted.among(problem, trial(problem), 100, seed=3)
    shipped = planted.shipment(planted.coins)
    changed = np.flatnonzero((shipped.x != problem.data.x_train).any(1))
    assert set(changed) == set(planted.slots)
    assert len(set(planted.slots)) == 100
    assert shipped.sizes == problem.partition.sizes
    assert {-1, 1} == set(planted.coins.tolist())
    for slot, client in zip(planted.slots, planted.clients, strict=True):
        assert slot in problem.partition.rows[client]
    zero_out = Planted.among(problem, trial(problem, adjacency="zero-out"), 100, seed=3)
    gone = zero_out.shipment(zero_out.coins)
    assert sum(map(len, gone.rows)) == sum(gone.sizes) - (zero_out.coins < 0).sum()


def test_what_cannot_be_audited_is_said(problem):
    with pytest.raises(UserError, match="claims nothing"):
        one_run_audit(trial(problem, epsilon=math.inf), problem)
    with pytest.raises(UserError, match="level = 'user'"):
        one_run_audit(trial(problem, level="user"), problem)
    with pytest.raises(UserError, match="samples rows"):
        one_run_audit(trial(problem, "dp-fedadamw"), problem)
    with pytest.raises(UserError, match="room for"):
        one_run_audit(trial(problem), problem, canaries=5000)
    with pytest.raises(UserError, match="canaries = 3"):
        one_run_audit(trial(problem), problem, canaries=3)


def test_options_of_the_other_kind_are_refused(fedsweep, tmp_path):
    code, _, err = fedsweep("audit", "dp-fedgd", "--cell", "x")
    assert code == 2
    assert "--cell goes with a results folder" in err
    code, _, err = fedsweep("audit", tmp_path, "--rounds", "3")
    assert code == 2
    assert "--rounds does not go with a results folder" in err
    code, _, err = fedsweep("audit", tmp_path / "nothing")
    assert code == 2
