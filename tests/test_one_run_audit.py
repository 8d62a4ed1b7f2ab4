"""The one-run audit: its bound, its guesses and its power."""

import math

import mpmath
import numpy as np
import pytest
import small
from scipy.special import expit, logit

from trainables.audit.one_run import (
    FACTORS,
    Canaries,
    best_guess_count,
    default_canaries,
    epsilon_lower_bound,
    guesses_needed,
    one_run_audit,
    smallest_detectable_mu,
    tail_probability,
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
def test_the_bound_is_the_paper_s(m, r, v, epsilon, delta):
    assert tail_probability(m, r, v, epsilon, delta) == pytest.approx(
        by_the_theorem(m, r, v, epsilon, delta), rel=1e-9, abs=1e-300
    )


def test_all_guesses_right():
    """Pure DP: r coins all right with probability 5% means q = 0.05^(1/r); eps = log(q / (1 - q))."""
    assert epsilon_lower_bound(100, 100, 100, 0.0) == pytest.approx(logit(0.05**0.01), abs=1e-6)
    assert epsilon_lower_bound(100, 100, 50, 0.0) == 0
    assert epsilon_lower_bound(100, 100, 100, 1e-5) < epsilon_lower_bound(100, 100, 100, 0.0)


def test_the_bound_holds_as_often_as_stated():
    """Randomised response, the worst eps-DP mechanism: at most one in twenty of 2,000 audits may exceed its eps."""
    correct = np.random.default_rng(1).binomial(200, expit(1.0), 2000)
    beyond = np.mean(correct >= guesses_needed(1.0, 0.0, 200, 200))
    assert 0.01 < beyond <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 2000)


def test_the_needed_number_of_guesses_exceeds_the_claim():
    needed = guesses_needed(1.0, 1e-5, 500, 200)
    assert epsilon_lower_bound(500, 200, needed, 1e-5) >= 1.0 > epsilon_lower_bound(500, 200, needed - 1, 1e-5)
    assert guesses_needed(10.0, 1e-5, 500, 200) == 201  # no number of correct guesses is enough
    assert smallest_detectable_mu(10.0, 1e-5, 500, 200) == math.inf
    assert best_guess_count(10.0, 1e-5, 500) == 500
    assert smallest_detectable_mu(1.0, 1e-5, 1000, 100) < smallest_detectable_mu(1.0, 1e-5, 100, 50)


# ---- the audit


@pytest.mark.parametrize("settings", [{}, {"adjacency": "zero-out"}, {"release": "secure-aggregation"}])
def test_planned_noise_passes_and_a_fraction_of_it_is_caught(problem, settings):
    """With secure aggregation fewer canaries can be distinguished, so the power is lower."""
    audited = trial(problem, **settings)
    honest = one_run_audit(audited, problem)
    assert not honest.caught
    assert honest.epsilon <= honest.plan.actual_epsilon[audited.privacy.release]
    assert honest.canaries == default_canaries(audited, problem)
    assert honest.noise in FACTORS
    assert honest.noise >= (0.02 if settings.get("release") else 0.05)
    weak = one_run_audit(audited, problem, noise_factor=honest.noise / 2)
    assert weak.caught
    assert weak.epsilon > 1 > honest.epsilon


@pytest.mark.parametrize("method", ["dp-fedavg", "dp-scaffold", "dp-ftrl", "dp-fedsofim", "dp-fedfc"])
def test_other_methods_are_audited_as_they_are(problem, method):
    """Local steps, control variates and trees: the audit sees the releases of the real client programs."""
    audited = trial(problem, method)
    assert not one_run_audit(audited, problem, canaries=200).caught
    assert one_run_audit(audited, problem, canaries=200, noise_factor=0.02).caught


def test_centred_and_weighted_runs_are_audited_as_they_are(problem):
    audited = trial(problem)
    audited = audited.model_copy(
        update={"aggregate": "size", "preprocess": audited.preprocess.model_copy(update={"center": 0.05})}
    )
    assert not one_run_audit(audited, problem, canaries=200).caught
    assert one_run_audit(audited, problem, canaries=200, noise_factor=0.02).caught


def test_canaries_change_only_their_rows(problem):
    planted = Canaries.plant(problem, trial(problem), 100, seed=3)
    shipped = planted.data(planted.coins)
    changed = np.flatnonzero((shipped.x != problem.data.x_train).any(1))
    assert set(changed) == set(planted.rows)
    assert len(set(planted.rows)) == 100
    assert shipped.sizes == problem.partition.sizes
    assert {-1, 1} == set(planted.coins.tolist())
    for row, client in zip(planted.rows, planted.clients, strict=True):
        assert row in problem.partition.rows[client]
    zero_out = Canaries.plant(problem, trial(problem, adjacency="zero-out"), 100, seed=3)
    shipped = zero_out.data(zero_out.coins)
    assert sum(map(len, shipped.rows)) == sum(shipped.sizes) - (zero_out.coins < 0).sum()


def test_runs_that_cannot_be_audited_are_refused(problem):
    with pytest.raises(UserError, match="claims no privacy"):
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
