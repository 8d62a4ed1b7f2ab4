"""Calibration and account: against the papers' tables, against 60-digit arithmetic, and against another library."""

import dataclasses
import itertools
import math
from pathlib import Path

import dp_accounting
import mpmath
import numpy as np
import pytest
import small
from dp_accounting import pld
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import brentq

from trainables.errors import UserError
from trainables.federation.pack import plan_of
from trainables.privacy import gaussian
from trainables.privacy.gaussian import budget, epsilon_of, least_false_negatives, log_delta, mu_of
from trainables.privacy.plan import (
    ADJACENCIES,
    RELEASES,
    Event,
    PrivacyPlan,
    PrivacySettings,
    delta_note,
    large_delta,
)
from trainables.privacy.roots import root

T, N = 70, 20  # rounds and clients of the main paper

EPSILONS = [1e-3, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 100.0, 1e3]
DELTAS = [1e-12, 1e-9, 1e-5, 1e-2]


def plan_for(epsilon, *, sizes=(1,) * N, rounds=T, **settings) -> PrivacyPlan:
    """One noisy gradient a round."""
    privacy = PrivacySettings(epsilon=epsilon, **settings)
    return PrivacyPlan.calibrate(privacy, [Event("gradient", rounds, privacy.sensitivity)], sizes=sizes)


# ---- the check values of METHODS.md


@pytest.mark.parametrize(("epsilon", "mu"), [(0.5, 0.1422), (1, 0.2681), (5, 1.1212), (10, 2.0004)])
def test_mu_table(epsilon, mu):
    assert mu_of(epsilon, 1e-5) == pytest.approx(mu, abs=5e-5)


@pytest.mark.parametrize(
    ("epsilon", "local", "secure"), [(0.5, 526.21, 117.66), (1, 279.17, 62.43), (5, 66.74, 14.92), (10, 37.41, 8.36)]
)
def test_sigma_table(epsilon, local, secure):
    """Replace-one, n = 20, T = 70: sigma_g = 2 sqrt(n T) / mu locally, 2 sqrt(T) / mu under secure aggregation."""
    assert plan_for(epsilon).noise_multiplier == pytest.approx(local, abs=0.005)
    assert plan_for(epsilon, release="secure-aggregation").noise_multiplier == pytest.approx(secure, abs=0.005)


def test_the_mechanism_is_the_formula():
    """A client adds N(0, (C sigma_g)^2 / n) to its sum, for any clip."""
    for clip in (0.1, 1.0, 10.0):
        plan = plan_for(1.0, clip=clip)
        sigma = 2 * math.sqrt(N * T) / mu_of(1.0, 1e-5)
        assert plan.noise_std["gradient"] == pytest.approx(clip * sigma / math.sqrt(N), rel=1e-6)


# ---- the closed form


def exact_log_delta(epsilon, mu):
    """delta(eps; mu) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2), in 600 binary digits."""
    with mpmath.workprec(600):
        epsilon, mu = mpmath.mpf(epsilon), mpmath.mpf(mu)
        first = mpmath.erfc((epsilon / mu - mu / 2) / mpmath.sqrt(2)) / 2
        second = mpmath.exp(epsilon) * mpmath.erfc((epsilon / mu + mu / 2) / mpmath.sqrt(2)) / 2
        return mpmath.log(first - second)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("delta", DELTAS)
def test_stable_over_the_whole_range(epsilon, delta):
    """The calibrated mu meets delta to nine digits of 600-bit arithmetic, and the way back finds eps again."""
    mu = mu_of(epsilon, delta)
    assert float(exact_log_delta(epsilon, mu)) == pytest.approx(math.log(delta), rel=1e-9)
    assert log_delta(epsilon, mu) <= math.log(delta)
    back = epsilon_of(mu, delta)
    assert back <= epsilon * (1 + 1e-11), "beyond rounding, never more than what was asked for"
    assert back == pytest.approx(epsilon, rel=1e-7)


@given(
    st.floats(math.log(1e-3), math.log(1e3)).map(math.exp),
    st.floats(math.log(1e-12), math.log(0.1)).map(math.exp),
    st.floats(1.001, 10),
)
def test_monotone(epsilon, delta, factor):
    mu = mu_of(epsilon, delta)
    assert mu_of(epsilon * factor, delta) > mu
    assert mu_of(epsilon, min(0.5, delta * factor)) > mu
    assert epsilon_of(mu * factor, delta) > epsilon_of(mu, delta)
    assert epsilon_of(mu, delta / factor) > epsilon_of(mu, delta)


def test_the_ends():
    assert epsilon_of(0.0, 1e-5) == 0.0
    assert epsilon_of(1e-9, 1e-5) == 0.0, "so much noise that delta alone covers it"
    assert epsilon_of(math.inf, 1e-5) == math.inf
    assert mu_of(math.inf, 1e-5) == math.inf
    assert log_delta(1.0, math.inf) == 0.0, "without noise everything is seen, with certainty"


@pytest.mark.parametrize("delta", [-0.5, 0.0, 1.0, 1.5, math.nan])
def test_a_delta_that_is_no_probability_is_refused(delta):
    for function in (epsilon_of, mu_of):
        with pytest.raises(UserError, match="delta = "):
            function(1.0, delta)


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match=r"mu = -0\.5"):
        epsilon_of(-0.5, 1e-5)
    for epsilon in (-0.5, 0.0):
        with pytest.raises(UserError, match=f"epsilon = {epsilon:g}"):
            mu_of(epsilon, 1e-5)


def test_a_budget_is_stated_once():
    """Given as eps, or as mu, which is converted to eps."""
    assert budget(2.0, None, 1e-5) == 2.0
    assert budget(None, mu_of(2.0, 1e-5), 1e-5) == pytest.approx(2.0)
    with pytest.raises(UserError, match="epsilon = 2 and mu = 1 state the budget twice"):
        budget(2.0, 1.0, 1e-5)
    with pytest.raises(UserError, match="the budget is missing"):
        budget(None, None, 1e-5)
    for mu in (-1.0, 0.0):
        with pytest.raises(UserError, match=f"mu = {mu:g}"):
            budget(None, mu, 1e-5)
    assert budget(None, 1e-3, 0.1) == 0, "however little: delta alone covers it"


def test_many_clients_seen_one_by_one():
    """Noise for the sum of 100,000 clients is next to none for a single one: still a finite, right number.
    For large mu, eps is about mu^2/2 + mu z with z = 4.26 the normal quantile of 1 - 1e-5."""
    mu = mu_of(1.0, 1e-5) * math.sqrt(100_000)
    assert epsilon_of(mu, 1e-5) == pytest.approx(mu**2 / 2 + 4.2649 * mu, rel=1e-3)


@pytest.fixture
def asked(monkeypatch):
    """How often delta(eps; mu) was computed: what a search costs, on any machine."""
    counted = itertools.count()
    plain = gaussian.log_delta
    monkeypatch.setattr(gaussian, "log_delta", lambda *given: (next(counted), plain(*given))[1])
    return lambda: next(counted)


@pytest.mark.parametrize(
    ("epsilon", "delta", "reach"),
    [(1e-13, 1e-5, 100), (1e-9, 0.999, 100), (1e-13, 1e-15, 1.01), (1e12, 1e-300, 1.01), (1e-13, 1e-21, 2)],
)
def test_beyond_the_range_it_still_answers(epsilon, delta, reach, asked):
    """On the safe side of 600-bit arithmetic, and within reach of the best: at most a hundredth below it, except where
    the rounding of mu dominates eps."""
    mu = mu_of(epsilon, delta)
    assert asked() < 200
    assert float(exact_log_delta(epsilon, mu)) <= math.log(delta) + 1e-3
    assert float(exact_log_delta(epsilon, mu * reach)) > math.log(delta)


@pytest.mark.parametrize("mu", [1e-15, 1e-9, 1e-4, 0.99e-3])
def test_delta_of_very_much_noise(mu):
    """Where its two terms are nearly one number, delta is right to eight digits."""
    for reach in (0.0, 0.1, 1.0, 5.0, 30.0, 200.0, 999.0, 1001.0, 5000.0):
        exact = float(exact_log_delta(mu * reach, mu))
        assert log_delta(mu * reach, mu) == pytest.approx(exact, abs=1e-8)


@pytest.mark.parametrize(("epsilon", "mu"), [(1.0, 1e-78), (1e300, 1e-15), (1.0, 1e-310), (0.0, 1e-310)])
def test_delta_of_noise_without_end(epsilon, mu):
    assert log_delta(epsilon, mu) < -600


@pytest.mark.parametrize("above", [1e-9, 1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("delta", DELTAS)
def test_epsilon_next_to_zero(delta, above, asked):
    """Where delta alone all but covers the mechanism, eps is tiny, but found soon. delta(0; mu) = 2 Phi(mu/2) - 1,
    which is delta at mu = 2 Phi^-1((1 + delta) / 2)."""
    border = 2 * math.sqrt(2) * float(mpmath.erfinv(mpmath.mpf(delta)))
    epsilon = epsilon_of(border * (1 + above), delta)
    assert asked() < 5000
    assert 0 <= epsilon < 10 * border * above + 1e-15
    assert not epsilon or log_delta(epsilon / 1.6, border * (1 + above)) > math.log(delta), "nor far above the least"
    assert epsilon_of(border * (1 - 1e-3), delta) == 0.0


@pytest.mark.parametrize("delta", DELTAS)
def test_never_rounded_to_the_wrong_side(delta):
    """A numerical root may lie on either side of the true one; the result is on the safe side, and close."""
    for k in range(60):
        mu = 1.18**k * 1e-2
        epsilon = epsilon_of(mu, delta)
        assert log_delta(epsilon, mu) <= math.log(delta)
        if epsilon > 1e-3:
            assert log_delta(epsilon * (1 - 1e-9), mu) > math.log(delta)
            assert log_delta(epsilon, mu_of(epsilon, delta)) <= math.log(delta)
            assert log_delta(epsilon, mu_of(epsilon, delta) * (1 + 1e-9)) > math.log(delta)


# ---- another library


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 5.0, 10.0])
@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("release", RELEASES)
def test_against_dp_accounting(epsilon, adjacency, release):
    """Google's accountant composes T Gaussian releases of multiplier std / sensitivity through discretised privacy loss
    distributions. Equal client sizes: the sum of n noises has sqrt(n) times the standard deviation of one."""
    plan = plan_for(epsilon, adjacency=adjacency, release=release)
    moved = 10.0 * (2 if adjacency == "replace-one" else 1)
    std = plan.noise_std["gradient"] * (math.sqrt(N) if release == "secure-aggregation" else 1)
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(dp_accounting.GaussianDpEvent(std / moved), T)
    assert plan.actual_epsilon[release] == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
    assert plan.actual_epsilon[release] == pytest.approx(epsilon, rel=1e-6)


def test_unequal_sizes_against_dp_accounting():
    """Secure aggregation over clients of 10, 20 and 40 rows, from the definition: the server sees the sum of
    (S_i + E_i) / |D_i|; a record of the smallest client moves it by 2C/10, and its noise has standard deviation
    s sqrt(1/10^2 + 1/20^2 + 1/40^2)."""
    plan = plan_for(2.0, sizes=(20, 10, 40), release="secure-aggregation")
    seen_std = plan.noise_std["gradient"] * math.sqrt(1 / 10**2 + 1 / 20**2 + 1 / 40**2)
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(dp_accounting.GaussianDpEvent(seen_std / (2 * 10.0 / 10)), T)
    assert accountant.get_epsilon(1e-5) == pytest.approx(2.0, rel=2e-3)


# ---- adjacency, release, sizes


def test_replace_one_costs_twice_the_noise():
    for release in RELEASES:
        double = plan_for(1.0, release=release).noise_std["gradient"]
        single = plan_for(1.0, release=release, adjacency="zero-out").noise_std["gradient"]
        assert double == pytest.approx(2 * single, rel=1e-6)


def test_add_remove_under_secure_aggregation_is_dp_fednew():
    """sigma_g = sqrt(T) / mu."""
    plan = plan_for(1.0, release="secure-aggregation", adjacency="zero-out")
    assert plan.noise_multiplier == pytest.approx(math.sqrt(T) / mu_of(1.0, 1e-5), rel=1e-6)


def test_actual_epsilon_of_each_release_model():
    """Noise calibrated for the sum gives a single client a mu that is sqrt(n) times larger, and vice versa."""
    mu = mu_of(1.0, 1e-5)
    for_sum = plan_for(1.0, release="secure-aggregation")
    assert for_sum.actual_epsilon["local"] == pytest.approx(epsilon_of(mu * math.sqrt(N), 1e-5), rel=1e-6)
    for_client = plan_for(1.0, release="local")
    assert for_client.actual_epsilon["secure-aggregation"] == pytest.approx(
        epsilon_of(mu / math.sqrt(N), 1e-5), rel=1e-6
    )


def test_unequal_sizes_cost_more_under_secure_aggregation():
    """Sizes 1 and 3: w = (1, 1/3). The record of the small client weighs 1, the noise sqrt(1 + 1/9) = sqrt(10)/3, so
    the factor on the noise is 3/sqrt(10) = 0.9487, against 1/sqrt(2) = 0.7071 for equal sizes."""
    equal = plan_for(1.0, sizes=(2, 2), release="secure-aggregation").noise_std["gradient"]
    unequal = plan_for(1.0, sizes=(1, 3), release="secure-aggregation").noise_std["gradient"]
    local = plan_for(1.0, sizes=(1, 3)).noise_std["gradient"]
    assert equal / local == pytest.approx(1 / math.sqrt(2), rel=1e-6)
    assert unequal / local == pytest.approx(3 / math.sqrt(10), rel=1e-6)


@pytest.mark.parametrize(
    ("level", "by_size", "even", "factor"),
    [
        ("record", False, False, 3 / math.sqrt(10)),  # weights 1 and 1/3
        ("record", True, False, 1 / math.sqrt(2)),  # each record weighs the same
        ("user", False, False, 1 / math.sqrt(2)),  # and so does each user
        ("user", True, False, 3 / math.sqrt(10)),  # weights 1 and 3
        ("user", True, True, 1 / math.sqrt(2)),  # the noise does not follow the sizes
    ],
)
def test_who_weighs_most_in_a_sum(level, by_size, even, factor):
    """Clients of 1 and 3 rows: the factor on the noise is max w / ||w||."""
    privacy = PrivacySettings(epsilon=1.0, release="secure-aggregation", level=level)
    event = Event("gradient", T, privacy.sensitivity, equal_weights=even)
    plan = PrivacyPlan.calibrate(privacy, [event], sizes=[1, 3], by_size=by_size)
    assert plan.noise_std["gradient"] == pytest.approx(factor * plan_for(1.0).noise_std["gradient"], rel=1e-6)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=30))
def test_sizes_matter_only_to_the_sum(sizes):
    """Locally every client stands alone. In the sum, noise never falls below that of equal sizes, nor above local."""
    local = plan_for(3.0, sizes=tuple(sizes)).noise_std["gradient"]
    summed = plan_for(3.0, sizes=tuple(sizes), release="secure-aggregation").noise_std["gradient"]
    assert local == plan_for(3.0, sizes=(1,)).noise_std["gradient"]
    assert local / math.sqrt(len(sizes)) * (1 - 1e-6) <= summed <= local * (1 + 1e-6)


# ---- methods whose released programs have another actual eps than they claim


def actual_epsilon_of(method, epsilon, **hypers) -> float:
    """Main paper's setting: 70 rounds, 20 clients, local release, replace-one."""
    trial = small.trial(small.problem(), method, hypers, rounds=T, epsilon=epsilon, clip=10.0)
    return plan_of(trial, [1] * N).actual_epsilon["local"]


@pytest.mark.parametrize(("epsilon", "actual"), [(0.5, 1.64), (1, 3.35), (5, 19.0), (10, 42.0)])
def test_ftrl_as_released_has_a_larger_epsilon_than_it_claims(epsilon, actual):
    """Noise for ceil(log2 70) + 1 = 8 releases where all 70 are released: mu is sqrt(70 / 8) times too large."""
    assert actual_epsilon_of("dp-ftrl", epsilon, as_released=True) == pytest.approx(actual, rel=5e-3)
    assert actual_epsilon_of("dp-ftrl", epsilon) == pytest.approx(epsilon, rel=1e-6)
    one = small.trial(small.problem(), "dp-ftrl", {"as_released": True}, rounds=1, epsilon=epsilon, clip=10.0)
    assert plan_of(one, [1] * N).actual_epsilon["local"] == pytest.approx(epsilon, rel=1e-6), (
        "a single release is paid for"
    )


@pytest.mark.parametrize(("epsilon", "actual"), [(1, 0.47), (10, 4.38)])
def test_scaffold_as_released_adds_twice_the_noise(epsilon, actual):
    assert actual_epsilon_of("dp-scaffold", epsilon, as_released=True) == pytest.approx(actual, abs=5e-3)
    assert actual_epsilon_of("dp-scaffold", epsilon) == pytest.approx(epsilon, rel=1e-6)


def test_local_steps_cost_releases():
    """K steps a round are T K releases: sqrt(K) times the noise."""
    one, four = (
        plan_of(small.trial(small.problem(), "dp-fedavg", {"local_steps": k}, rounds=T), [1] * N) for k in (1, 4)
    )
    assert four.noise_std["gradient"] == pytest.approx(2 * one.noise_std["gradient"], rel=1e-6)


def test_a_curious_client_and_mu_as_the_page_says():
    """docs/privacy.md: one of n clients takes its own noise off the sum; and what mu = 1 is."""
    text = " ".join((Path(__file__).parents[1] / "docs" / "privacy.md").read_text().split())  # wherever its lines break
    seen = {n: epsilon_of(mu_of(1, 1e-5) * math.sqrt(n / (n - 1)), 1e-5) for n in (2, 20)}
    assert f"a claimed ε of 1 is then {seen[2]:.2f} with 2 clients and {seen[20]:.2f} with 20" in text
    assert f"({epsilon_of(1.0, 1e-5):.2f} for μ = 1 at 1e-5)" in text


def test_what_the_page_says_of_samples_users_and_fednew():
    """docs/privacy.md: what secret samples hide, what secret participation saves, DP-FedNew's actual eps."""
    text = " ".join((Path(__file__).parents[1] / "docs" / "privacy.md").read_text().split())  # wherever its lines break
    adamw = plan_of(small.trial(small.problem(), "dp-fedadamw", {}, rounds=70, epsilon=1.0), [2500] * 20)
    assert f"an actual ε of 1 with secret samples and {adamw.unsampled['local']:.0f} without" in text

    def users(share):
        privacy = {"level": "user", "release": "secure-aggregation", "adjacency": "zero-out"}
        trial = small.trial(small.problem(), "dp-fedavg", rounds=70, epsilon=1.0, secret_participation=share, **privacy)
        return plan_of(trial, [50] * 100)

    some, all_of_them = users(0.1), users(1.0)
    less = max(some.noise_std.values()) / max(all_of_them.noise_std.values())
    unsampled = some.unsampled["secure-aggregation"]
    assert f"ε = 1 ({unsampled:.1f} with known participants) and zero-out" in text
    assert f"the noise of the sum is {less:.3f} times that of full participation" in text
    assert f"the noise of the mean is {10 * less:.2f} times as large" in text
    for clip, sentence in ((1.0, "at most {:.0f} (with"), (2.0, "(with C₂ = 2: {:.1f})")):
        hypers = {"as_released": True, "alpha": 0.1, "rho": 1.0, "hessian_clip": 1.0, "sum_clip": clip}
        seen = {"release": "secure-aggregation", "clip": 1.0, "epsilon": 1.0}
        trial = small.trial(small.problem(), "dp-fednew", hypers, rounds=70, **seen)
        assert sentence.format(plan_of(trial, [325] * 100).actual_epsilon["secure-aggregation"]) in text


def test_the_tree_of_ftrl():
    """Three rounds: the prefixes 1, 2 and 3 use the nodes {1}, {1,2} and {1,2} + {3}, of 1, 2 and 1 leaves. A record is
    under all of them: the sensitivity is 2C sqrt(1 + 4 + 1) = 20 sqrt(6)."""
    trial = small.trial(small.problem(), "dp-ftrl", rounds=3, epsilon=1.0, clip=10.0)
    std = plan_of(trial, [1] * N).noise_std["tree"]
    assert std == pytest.approx(20 * math.sqrt(6) / mu_of(1.0, 1e-5), rel=1e-6)


def test_the_covariance_of_fedfc_as_released_is_not_paid_for():
    """So the actual eps is infinite. Its noise is what a bound of 1 would need at the gradients' multiplier, and the
    gradients' is that of the claim."""
    trial = small.trial(small.problem(), "dp-fedfc", {"as_released": True}, rounds=T, epsilon=1.0, clip=10.0)
    plan = plan_of(trial, [1] * N)
    assert plan.actual_epsilon == {"local": math.inf, "secure-aggregation": math.inf}
    mu = mu_of(1.0, 1e-5)
    assert plan.noise_std["gradient"] == pytest.approx(20 * math.sqrt(T) / mu, rel=1e-6)
    assert plan.noise_std["covariance"] == pytest.approx(2 * math.sqrt(T) / mu, rel=1e-6)


def test_the_covariance_of_fedfc_is_paid_for():
    """A tenth of mu^2 for one release that moves by sqrt(2) C_c^2, nine tenths for T gradients."""
    trial = small.trial(small.problem(), "dp-fedfc", {"feature_clip": 3.0}, rounds=T, epsilon=1.0, clip=10.0)
    std = plan_of(trial, [1] * N).noise_std
    mu = mu_of(1.0, 1e-5)
    assert std["covariance"] == pytest.approx(math.sqrt(2) * 9 / (math.sqrt(0.1) * mu), rel=1e-6)
    assert std["gradient"] == pytest.approx(20 * math.sqrt(T) / (math.sqrt(0.9) * mu), rel=1e-6)


# ---- claimed and actual


@given(
    epsilon=st.floats(math.log(1e-3), math.log(1e3)).map(math.exp),
    delta=st.floats(math.log(1e-12), math.log(1e-2)).map(math.exp),
    clip=st.floats(1e-3, 1e3),
    rounds=st.integers(1, 10_000),
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=20),
    release=st.sampled_from(RELEASES),
    adjacency=st.sampled_from(ADJACENCIES),
)
def test_actual_never_exceeds_claimed(epsilon, delta, clip, rounds, sizes, release, adjacency):
    """Noise is rounded up to float32, which is the noise that is added: the actual eps is slightly below the claim."""
    plan = plan_for(
        epsilon, delta=delta, clip=clip, rounds=rounds, sizes=tuple(sizes), release=release, adjacency=adjacency
    )
    assert plan.actual_epsilon[release] <= epsilon
    assert plan.actual_epsilon[release] == pytest.approx(epsilon, rel=1e-5)
    std = plan.noise_std["gradient"]
    assert float(np.float32(std)) == std, "the noise that is added is the noise that is accounted for"


def test_the_account_follows_the_noise():
    """One object: changing the noise changes the eps. Half the noise, twice the mu."""
    plan = plan_for(1.0)
    half = dataclasses.replace(plan, noise_std={"gradient": plan.noise_std["gradient"] / 2})
    assert half.actual_epsilon["local"] == pytest.approx(epsilon_of(2 * plan.mu("local"), 1e-5))
    with pytest.raises(AttributeError):
        plan.noise_std = {}


def test_noise_of_one_is_noise_like_any_other():
    plan = dataclasses.replace(plan_for(1.0), noise_std={"gradient": 1.0})
    assert plan.mu("local") == pytest.approx(20 * math.sqrt(T))


def test_noise_beyond_float32_is_refused():
    with pytest.raises(UserError, match=r"clip = 1e\+37 needs more noise than float32 holds, at epsilon = 0\.001"):
        plan_for(1e-3, clip=1e37)


def test_noise_calibrated_for_too_small_a_sensitivity_has_a_larger_epsilon():
    """Shares need not add up then; also of samples."""
    events = [Event("gradient", 4, 20.0, calibrated_for=10.0, sampling=rate) for rate in (1.0, 0.3)]
    for event in events:
        plan = PrivacyPlan.calibrate(PrivacySettings(epsilon=1.0), [event], sizes=[5])
        believed = dataclasses.replace(event, sensitivity=10.0, calibrated_for=None)
        as_if = PrivacyPlan.calibrate(PrivacySettings(epsilon=1.0), [believed], sizes=[5])
        assert plan.noise_std == as_if.noise_std
        assert plan.mu("local") == pytest.approx(2 * as_if.mu("local"))
        assert plan.actual_epsilon["local"] > 1.5 * as_if.actual_epsilon["local"]
        PrivacyPlan.calibrate(PrivacySettings(epsilon=1.0), [dataclasses.replace(event, share=0.5)], sizes=[5])


def test_the_multiplier_is_that_of_what_is_released_first():
    events = [Event("gradient", T, 20.0, share=0.75), Event("covariance", 1, 3.0, share=0.25)]
    plan = PrivacyPlan.calibrate(PrivacySettings(epsilon=1.0), events, sizes=[1] * N)
    assert plan.noise_multiplier == pytest.approx(plan.noise_std["gradient"] * math.sqrt(N) / 10)


def test_non_private_arm_is_a_configuration():
    for release in RELEASES:
        plan = plan_for(math.inf, release=release)
        assert plan.noise_std["gradient"] == 0.0
        assert plan.actual_epsilon == {"local": math.inf, "secure-aggregation": math.inf}


def test_shares_of_the_budget():
    """A quarter of mu^2 for a one-time release, the rest for T steps: together they cost exactly the claim."""
    privacy = PrivacySettings(epsilon=1.0)
    once, steps = Event("covariance", 1, 3.0, share=0.25), Event("gradient", T, 20.0, share=0.75)
    plan = PrivacyPlan.calibrate(privacy, [once, steps], sizes=[5, 7])
    mu = mu_of(1.0, 1e-5)
    assert 3.0 / plan.noise_std["covariance"] == pytest.approx(math.sqrt(0.25) * mu, rel=1e-6)
    assert math.sqrt(T) * 20.0 / plan.noise_std["gradient"] == pytest.approx(math.sqrt(0.75) * mu, rel=1e-6)
    assert plan.actual_epsilon["local"] <= 1.0
    assert plan.actual_epsilon["local"] == pytest.approx(1.0, rel=1e-6)


def test_shares_that_do_not_add_up_are_refused():
    events = [Event("covariance", 1, 3.0, share=0.5), Event("gradient", T, 20.0, share=0.75)]
    with pytest.raises(UserError, match=r"1\.25"):
        PrivacyPlan.calibrate(PrivacySettings(epsilon=1.0), events, sizes=[5, 7])


# ---- bad input


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"epsilon": 0.0}, "epsilon = 0"),
        ({"epsilon": -1.0}, "epsilon = -1"),
        ({"epsilon": math.nan}, "epsilon = nan"),
        ({"epsilon": 1.0, "delta": 0.0}, "delta = 0"),
        ({"epsilon": 1.0, "delta": 1.0}, "delta = 1"),
        ({"epsilon": 1.0, "delta": -0.1}, "delta = -0.1"),
        ({"epsilon": 1.0, "clip": 0.0}, "clip = 0"),
        ({"epsilon": 1.0, "clip": math.inf}, "clip = inf"),
        ({"epsilon": 1.0, "clip": math.nan}, "clip = nan"),
    ],
    ids=str,
)
def test_bad_settings_are_named(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        plan_for(**settings)


def test_delta_above_one_in_n_is_named():
    assert delta_note(PrivacySettings(epsilon=1.0, delta=1e-3), [5000, 5000]) is not None
    assert "1/N" in delta_note(PrivacySettings(epsilon=1.0, delta=0.1, level="user"), [5000] * 20)
    assert delta_note(PrivacySettings(epsilon=1.0), [5000, 5000]) is None
    assert delta_note(PrivacySettings(epsilon=math.inf, delta=0.1), [5000, 5000]) is None


def test_delta_is_compared_with_the_number_of_those_protected():
    assert large_delta(1e-4, "record", 10_000) is None, "just allowed"
    said = "delta = {} is above 1/N = {}, with {}: too large for a privacy claim"
    assert large_delta(1.5e-4, "record", 10_000) == said.format("0.00015", "0.0001", "10000 records")
    assert large_delta(0.1, "user", 20) == said.format("0.1", "0.05", "20 users")
    assert delta_note(PrivacySettings(epsilon=1.0, delta=1.5e-4), [5000, 5000]) == large_delta(1.5e-4, "record", 10_000)
    assert delta_note(PrivacySettings(epsilon=1.0, delta=0.1, level="user"), [9] * 20) == large_delta(0.1, "user", 20)


def test_add_remove_is_refused():
    with pytest.raises(ValueError, match="zero-out"):
        PrivacySettings(epsilon=1.0, adjacency="add-remove")


def test_fedadamw_as_released_has_almost_no_privacy():
    trial = small.trial(small.problem(), "dp-fedadamw", {"as_released": True}, epsilon=1.0, rounds=70)
    assert plan_of(trial, (2500,) * 20).actual_epsilon["local"] > 10_000


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
def test_a_record_can_reverse_both_layers_of_fedadamw_as_released(adjacency):
    """A record that is added can turn the clipped mean of a layer from one direction into the opposite one."""
    hypers = {"as_released": True, "sampling_rate": 0.1}
    trial = small.trial(small.problem(), "dp-fedadamw", hypers, epsilon=1.0, clip=3.0, adjacency=adjacency)
    (event,) = plan_of(trial, (200,) * 20).events
    contribution = event.sensitivity / trial.privacy.adjacency_factor
    assert contribution >= 2 * 3.0 * 0.1 * 200 * math.sqrt(2) * (1 - 1e-9)


def test_the_trade_off_curve_is_the_gaussian_tests():
    """One who sees N(0, 1) or N(mu, 1) and says "the second" above z has alarms Phi(-z) and misses Phi(z - mu)."""
    for z in (-1.0, 0.0, 2.0):
        assert least_false_negatives(1.5, stats.norm.sf(z)) == pytest.approx(stats.norm.cdf(z - 1.5))
    assert least_false_negatives(0.0, 0.3) == pytest.approx(0.7)  # no information: guessing
    assert least_false_negatives(1.0, 0.0) == 1
    for nonsense in (-0.5, 1.5):
        with pytest.raises(UserError, match="false_positives = "):
            least_false_negatives(1.0, nonsense)


@pytest.mark.parametrize(
    ("name", "refused", "allowed"),
    [
        ("epsilon", [0.0, -0.5, math.nan], [1e-9, math.inf]),
        ("delta", [0.0, -0.5, 1.0, 1.5], [1e-300, 0.999]),
        ("clip", [0.0, -0.5, math.inf], [1e-9, 1e9]),
        ("secret_participation", [0.0, -0.5, 1.5], [1e-9, 1.0]),
    ],
)
def test_what_a_claim_may_say(name, refused, allowed):
    """Up to the bounds of every range."""
    for value in refused:
        with pytest.raises(UserError, match=f"^{name} = "):
            PrivacySettings(**{"epsilon": 1.0, name: value}).check()
    for value in allowed:
        PrivacySettings(**{"epsilon": 1.0, name: value}).check()


@pytest.mark.parametrize("delta", [1e-12, 9e-13, 1e-13])
def test_no_account_of_samples_below_what_its_tails_allow(delta):
    settings = PrivacySettings(epsilon=1.0, delta=delta)
    sampled = [Event("gradient", 10, 10.0, sampling=0.1)]
    if delta < 1e-12:
        with pytest.raises(UserError, match="delta of a method that samples"):
            PrivacyPlan.calibrate(settings, sampled, sizes=[100] * 4)
    else:
        assert PrivacyPlan.calibrate(settings, sampled, sizes=[100] * 4).actual_epsilon["local"] <= 1


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
def test_who_sees_every_client_sees_who_took_part(adjacency):
    """A coin that only a sum hides gets no credit under local release: eps is the unsampled one."""
    settings = PrivacySettings(epsilon=2.0, release="secure-aggregation", adjacency=adjacency, level="user")
    event = Event("update", 20, settings.sensitivity, sampling=0.3, hidden_by_sum=True)
    plan = PrivacyPlan.calibrate(settings, [event], sizes=[100] * 5)
    assert plan.actual_epsilon["secure-aggregation"] < 0.9 * plan.unsampled["secure-aggregation"]
    assert plan.actual_epsilon["local"] == pytest.approx(plan.unsampled["local"], rel=0.02)


def test_roots_are_those_of_scipy():
    """Bit for bit: recorded accounts do not depend on which of the two found them."""
    for curve, target in itertools.product((lambda x: x**3, lambda x: math.expm1(x / 100)), np.logspace(-3, 3, 40)):

        def function(x, curve=curve, target=target):
            return curve(x) - target

        assert root(function, 0.0, 1000.0) == brentq(function, 0.0, 1000.0, xtol=1e-15, rtol=1e-14)
    assert root(lambda x: x, 0.0, 1.0) == 0.0
    assert root(lambda x: x - 1, 0.0, 1.0) == 1.0


SHAPES = {
    "cubic": (lambda x: x**3 - 2 * x - 5, 0.0, 4.0),
    "falls": (lambda x: math.cos(x) - x, 0.0, 2.0),
    "bent": (lambda x: x**5 - 1, 0.0, 3.0),
    "steep": (lambda x: math.atan(1e6 * (x - 0.3)), -1.0, 2.0),
    "exact": (lambda x: x - 0.5, 0.0, 1.0),
    "exact inside": (lambda x: (x - 0.5) * (x + 2), 0.0, 1.0),
    "one at the ends": (lambda x: 1.0 if x > 0.7 else -1.0, 0.0, 1.0),
    "far": (lambda x: math.log(x) - 20, 1e-3, 1e12),
    "below zero": (lambda x: math.exp(x) - 1e-4, -40.0, 3.0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_search_for_a_root_tries_what_scipy_tries(name):
    function, low, high = SHAPES[name]

    def tried(solver, **tolerances):
        points = []
        solver(lambda x: points.append(x) or function(x), low, high, **tolerances)
        return points

    assert tried(root) == tried(brentq, xtol=1e-15, rtol=1e-14)


def test_a_root_that_is_not_found_is_an_error():
    """After as many steps as scipy tries. The function is nearly flat around its root."""
    with pytest.raises(ArithmeticError, match="no root was found in 100 steps"):
        root(lambda x: (x - 1) ** 9, 0.0, 3.0)
