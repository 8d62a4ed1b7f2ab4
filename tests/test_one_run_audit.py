"""The one-run audit: its bound, its guesses and its power."""

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
import small
from scipy.optimize import linprog
from scipy.special import expit, logit, ndtr, ndtri

from trainables.audit.canaries import Canaries
from trainables.audit.coin_bounds import (
    CoinScores,
    best_guess_count,
    detectable_ratio,
    epsilon_lower_bound,
    fdp_mu_bound,
    is_refuted,
    tail_probability,
)
from trainables.audit.one_run import audit_lanes, default_canaries, one_run_audit
from trainables.errors import UserError
from trainables.privacy.gaussian import epsilon_of

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
    bounds = {count: epsilon_lower_bound(200, 200, count, 0.0) for count in set(correct.tolist())}
    beyond = np.mean([bounds[count] > 1.0 for count in correct.tolist()])
    assert 0.01 < beyond <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 2000)


# ---- the f-DP bound


def largest_tail(mu, correct, guesses):
    """The largest probability of this many correct guesses or more that the theorem's inequalities allow, by linear
    programming. The blow-up Phi(Phi^-1(x) + mu) is concave, so its tangents are the inequalities."""
    rows, limits = [], []
    for j in range(1, guesses + 1):
        right = np.array([i if i >= j else 0 for i in range(guesses + 1)]) / guesses
        wrong = np.array([guesses - i if i >= j - 1 else 0 for i in range(guesses + 1)]) / guesses
        for x in ndtr(np.linspace(-6, 6, 400)):
            slope = math.exp(-mu * mu / 2 - mu * ndtri(x))
            rows.append(right - slope * wrong)
            limits.append(ndtr(ndtri(x) + mu) - slope * x)
    target = -(np.arange(guesses + 1) >= correct).astype(float)
    found = linprog(target, rows, limits, np.ones((1, guesses + 1)), [1.0])
    return -found.fun


@pytest.mark.parametrize(("mu", "correct"), [(0.5, 9), (1.0, 11), (1.0, 12), (2.0, 12)])
def test_the_f_dp_bound_is_the_theorem_s(mu, correct):
    tail = largest_tail(mu, correct, 12)
    assert is_refuted(mu, correct, 12, 12, level=1.02 * tail + 1e-3)
    assert not is_refuted(mu, correct, 12, 12, level=0.98 * tail - 1e-3)


def test_the_f_dp_bound_beats_the_plain_one_at_large_eps():
    """1,000 independent canaries of a run with eps 10 at 1e-5 (mu 2.0004)."""
    count = best_guess_count(2.0004, 1000)
    scores = np.random.default_rng(3).standard_normal(1000) + 1.0002
    correct = int((scores[np.argsort(-np.abs(scores))[:count]] > 0).sum())
    assert 4.5 < epsilon_of(fdp_mu_bound(correct, count, 1000), 1e-5) < 10
    assert epsilon_lower_bound(1000, count, correct, 1e-5) < 4.5


# ---- the Gaussian bound


def ideal(rng, canaries, mu=2.0004, noise=1.0, effect=1.0, gram=None):
    """Scores of canaries in Gaussian noise."""
    gram = mu * mu / 4 * np.eye(canaries) if gram is None else gram
    coins = 2 * rng.integers(0, 2, canaries) - 1
    root = np.linalg.cholesky(gram)
    return CoinScores(gram, effect * gram @ coins + noise * root @ rng.standard_normal(canaries), coins, 0 * coins)


@pytest.mark.parametrize(("canaries", "mean"), [(310, 9.1), pytest.param(1000, 9.5, marks=pytest.mark.audits)])
def test_the_gaussian_bound_is_close(canaries, mean):
    """For independent canaries of a run with eps 10. The means, as documented, are those of 400 simulated runs."""
    rng = np.random.default_rng(4)
    bounds = [epsilon_of(ideal(rng, canaries).gaussian_mu_bound(), 1e-5) for _ in range(10)]
    assert np.mean(bounds) == pytest.approx(mean, abs=0.3)


def test_the_gaussian_bound_holds_as_often_as_stated():
    """Canaries that interfere: of 1,000 bounds at most 5%, plus sampling error, exceed the mu of the most visible."""
    rng = np.random.default_rng(5)
    effects = rng.standard_normal((60, 40)) * rng.uniform(0.5, 1.5, 40) / 8
    scores = [ideal(rng, 40, gram=effects.T @ effects) for _ in range(1000)]
    beyond = np.mean([one.gaussian_mu_bound() > one.mu for one in scores])
    assert 0.01 < beyond < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)


@pytest.mark.parametrize("change", [{"noise": 0.7}, {"effect": 1.5}])
def test_less_noise_and_larger_effects_are_caught(change):
    rng = np.random.default_rng(6)
    assert ideal(rng, 310, **change).gaussian_mu_bound() > 2.0004


def test_the_stated_power_is_reached():
    rng, ratio = np.random.default_rng(7), detectable_ratio(200)
    assert 0.8 < ratio < 0.9
    caught = [ideal(rng, 200, noise=ratio).gaussian_mu_bound() > 2.0004 for _ in range(200)]
    assert np.mean(caught) > 0.9


# ---- the audit


@pytest.mark.parametrize("settings", [{}, {"adjacency": "zero-out"}, {"release": "secure-aggregation"}])
@pytest.mark.parametrize("epsilon", [1.0, 10.0])
def test_planned_noise_passes_and_a_fraction_of_it_is_caught(problem, settings, epsilon):
    """With secure aggregation fewer canaries can be distinguished, so the power is lower."""
    audited = trial(problem, epsilon=epsilon, **settings)
    honest = one_run_audit(audited, problem, seed=2)  # not one of the few per cent that are caught by chance
    assert not honest.caught
    assert honest.plain_epsilon <= honest.fdp_epsilon <= honest.epsilon <= epsilon
    assert honest.epsilon > 0.5 * epsilon
    assert honest.canaries == default_canaries(audited, problem)
    assert honest.detectable_noise > 0.6
    assert one_run_audit(audited, problem, noise_factor=0.95 * honest.detectable_noise, seed=1).caught


def test_lanes_are_audited_like_runs(problem):
    trials = [trial(problem).model_copy(update={"seed": seed}) for seed in (1, 2)]
    together = audit_lanes(trials, problem, canaries=100)
    alone = [one_run_audit(one, problem, canaries=100) for one in trials]
    assert [found.mu for found in together] == pytest.approx([found.mu for found in alone], rel=1e-9)
    assert together[0].mu != together[1].mu


@pytest.mark.parametrize("method", ["dp-fedavg", "dp-scaffold", "dp-ftrl", "dp-fedsofim", "dp-fedfc"])
def test_other_methods_are_audited_as_they_are(problem, method):
    """Local steps, control variates and trees: the audit sees the releases of the real client programs."""
    audited = trial(problem, method)
    assert not one_run_audit(audited, problem, canaries=200).caught
    assert one_run_audit(audited, problem, canaries=200, noise_factor=0.5).caught


def test_centred_and_weighted_runs_are_audited_as_they_are(problem):
    audited = trial(problem)
    audited = audited.model_copy(
        update={"aggregate": "size", "preprocess": audited.preprocess.model_copy(update={"center": 0.05})}
    )
    assert not one_run_audit(audited, problem, canaries=200).caught
    assert one_run_audit(audited, problem, canaries=200, noise_factor=0.5).caught


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


# ---- users


@pytest.fixture(scope="module")
def users():
    return small.problem(DATA, clients=20)


@pytest.mark.parametrize(
    ("method", "aggregate"),
    [("dp-fedgd", "uniform"), ("dp-fedavg", "size"), ("dp-scaffold", "size"), ("dp-fedfc", "uniform")],
)
def test_users_are_audited(users, method, aggregate):
    audited = trial(users, method, epsilon=10.0, level="user").model_copy(update={"aggregate": aggregate})
    honest = one_run_audit(audited, users)
    assert honest.canaries == 20
    assert not honest.caught
    assert honest.epsilon > 2
    assert one_run_audit(audited, users, noise_factor=0.7 * honest.detectable_noise, seed=1).caught


@pytest.mark.parametrize("settings", [{"adjacency": "zero-out"}, {"release": "secure-aggregation"}])
def test_users_are_audited_under_other_claims(users, settings):
    audited = trial(users, "dp-fedavg", epsilon=10.0, level="user", **settings)
    honest = one_run_audit(audited, users)
    assert not honest.caught
    assert honest.epsilon > 4
    assert one_run_audit(audited, users, noise_factor=0.7 * honest.detectable_noise, seed=1).caught


def test_honest_users_are_rarely_accused(users):
    """Users that contribute exactly their bound: of 100 runs at most 5%, plus sampling error, exceed the claim."""
    audited = trial(users, epsilon=10.0, level="user", adjacency="zero-out", rounds=2)
    trials = [audited.model_copy(update={"seed": seed}) for seed in range(50)]
    found = [one for seed in (1, 2) for one in audit_lanes(trials, users, seed=seed)]
    assert sum(one.caught for one in found) <= 11
    assert all(one.detectable_noise == pytest.approx(detectable_ratio(20), rel=1e-3) for one in found)


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
def test_users_who_take_part_secretly_are_audited(users, adjacency):
    """The account credits secrecy, and so does the bound: with the planned noise and visibility 1 it is the claim."""
    settings = {"level": "user", "release": "secure-aggregation", "secret_participation": 0.5, "adjacency": adjacency}
    audited = trial(users, "dp-fedavg", epsilon=5.0, **settings)
    honest = one_run_audit(audited, users)
    assert honest.sampled
    assert not honest.caught
    assert honest.epsilon > 1.5
    claimed = replace(honest, mu=honest.visible_mu * 2 / (honest.plan.mechanism[0].multiplier * honest.release_mu))
    if adjacency == "replace-one":
        assert claimed.epsilon == pytest.approx(5.0, rel=2e-3)
    assert one_run_audit(audited, users, noise_factor=0.7 * honest.detectable_noise, seed=1).caught


def test_a_user_without_rows_must_contribute_nothing(users):
    with pytest.raises(UserError, match="still contributes to dp-scaffold"):
        one_run_audit(trial(users, "dp-scaffold", level="user", adjacency="zero-out"), users)


def test_runs_that_cannot_be_audited_are_refused(problem, users):
    with pytest.raises(UserError, match="claims no privacy"):
        one_run_audit(trial(problem, epsilon=math.inf), problem)
    with pytest.raises(UserError, match="samples rows"):
        one_run_audit(trial(problem, "dp-fedadamw"), problem)
    with pytest.raises(UserError, match="not linear in its noise"):
        one_run_audit(trial(problem, "dp-localadamw", hypers={"sampling_rate": 1.0}), problem)
    with pytest.raises(UserError, match="room for"):
        one_run_audit(trial(problem), problem, canaries=5000)
    with pytest.raises(UserError, match="canaries = 3"):
        one_run_audit(trial(problem), problem, canaries=3)
    with pytest.raises(UserError, match="the clients have room for 20"):
        one_run_audit(trial(users, level="user"), users, canaries=21)


def test_options_of_the_other_kind_are_refused(fedsweep, tmp_path):
    code, _, err = fedsweep("audit", "dp-fedgd", "--cell", "x")
    assert code == 2
    assert "--cell goes with a results folder" in err
    code, _, err = fedsweep("audit", tmp_path, "--rounds", "3")
    assert code == 2
    assert "--rounds cannot be combined with a results folder" in err
    code, _, err = fedsweep("audit", tmp_path / "nothing")
    assert code == 2
