"""User level: the client with all it holds is the record. Twin, contract and account."""

import math

import pytest
import small
import twin_agreement
import twin_user

from trainables.audit.paired import audit
from trainables.errors import UserError
from trainables.federation.pack import check, pack_group, plan_of
from trainables.methods import METHODS
from trainables.privacy.gaussian import mu_of
from trainables.privacy.plan import RELEASES, PrivacySettings

# in addition to the defaults
SETTINGS = {
    "dp-fedsofim": [{"direction": "gradient", "learning_rate": 0.05, "rho": 1.0}],
    "dp-fedavg": [{"local_steps": 4, "client_learning_rate": 0.05, "server_learning_rate": 0.5}],
    "dp-scaffold": [
        {"local_steps": 3, "client_learning_rate": 0.05, "server_learning_rate": 0.5},
        {"local_steps": 2, "client_learning_rate": 0.02, "as_released": True},
    ],
    "dp-fedfc": [{"learning_rate": 0.1, "gamma": 5.0, "feature_clip": 2.0, "covariance_share": 0.5}],
}
CASES = [(name, hypers) for name in twin_user.METHODS for hypers in [{}, *SETTINGS.get(name, [])]]
every_method = pytest.mark.parametrize("name", [name for name, method in METHODS.items() if "user" in method.levels])


def assert_agrees(name, hypers, of, **privacy):
    settings = {"level": "user", "clip": 0.7, **privacy}
    trial = small.trial(of, name, hypers, rounds=25, every=10, **settings)
    twin_agreement.assert_agrees(trial, of, twin_user.train)


@pytest.mark.parametrize(("name", "hypers"), CASES, ids=[f"{n}-{h}" for n, h in CASES])
def test_agrees_with_the_twin(name, hypers, small_problem):
    """The clients' mean gradients are about 3 long: a clip of 0.7 shortens every one."""
    assert_agrees(name, hypers, small_problem)


@pytest.mark.parametrize("name", twin_user.METHODS)
@pytest.mark.parametrize(
    "privacy",
    [{"epsilon": 20.0, "release": "secure-aggregation", "adjacency": "zero-out"}, {"clip": 50.0}],
    ids=["other privacy", "nothing is clipped"],
)
def test_agrees_with_the_twin_under_other_privacy(name, privacy, small_problem):
    local = name in ("dp-scaffold", "dp-fedavg")
    calm = {"server_learning_rate": 0.05} if local else {"learning_rate": 0.01}
    assert_agrees(name, calm, small_problem, **privacy)


def varied_users(name, of, count):
    trials = small.varied_trials(name, of, count)
    return [t.model_copy(update={"privacy": t.privacy.model_copy(update={"level": "user"})}) for t in trials]


@every_method
def test_lanes_hosts_and_restarts_leave_the_same_bits(name, small_problem):
    small.assert_same_bits(varied_users(name, small_problem, 18), small_problem)


@every_method
def test_users_and_records_never_share_a_pack(name, small_problem):
    groups = {pack_group(small.trial(small_problem, name, level=level)) for level in ("record", "user")}
    assert len(groups) == 2


# ---- the account


@every_method
def test_the_actual_epsilon_is_the_claimed_one_whatever_the_sizes(name, small_problem):
    """A user has weight 1, for any number of rows."""
    for release in RELEASES:
        trial = small.trial(small_problem, name, rounds=70, epsilon=2.0, level="user", release=release)
        plans = [plan_of(trial, sizes) for sizes in ([30, 10, 200], [7, 7, 7])]
        assert plans[0].weights == plans[1].weights == (1.0, 1.0, 1.0)
        assert plans[0].noise_std == plans[1].noise_std
        assert plans[0].actual_epsilon[release] == pytest.approx(2.0, rel=1e-5)
        assert plans[0].actual_epsilon[release] <= 2.0


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
def test_the_noise_is_the_paper_s(adjacency, small_problem):
    """Algorithm 8 under secure aggregation: every client adds N(0, C^2 sigma^2 / n), sigma = sqrt(T) / mu, twice that
    where a user is replaced."""
    trial = small.trial(
        small_problem, "dp-fedgd", rounds=70, level="user", release="secure-aggregation", adjacency=adjacency
    )
    sigma = {"replace-one": 2, "zero-out": 1}[adjacency] * math.sqrt(70) / mu_of(8.0, 1e-5)
    std = plan_of(trial, small_problem.partition.sizes).noise_std["gradient"]
    assert std == pytest.approx(5.0 * sigma / math.sqrt(5), rel=1e-6)


def test_the_covariance_of_a_user_is_paid_for(small_problem):
    """A mean of x x^T has norm at most C_c^2; two such matrices, having no negative eigenvalue, are at most
    sqrt(2) C_c^2 apart."""
    trial = small.trial(small_problem, "dp-fedfc", {"feature_clip": 3.0}, epsilon=1.0, level="user")
    std = plan_of(trial, [9, 1, 40]).noise_std["covariance"]
    assert std == pytest.approx(math.sqrt(2) * 9 / (math.sqrt(0.1) * mu_of(1.0, 1e-5)), rel=1e-6)


def test_local_steps_of_a_user_cost_nothing_more(small_problem):
    """One release a round, independent of earlier noise; in a sum of n clients the noise adds up."""
    plans = [
        plan_of(
            small.trial(small_problem, "dp-fedavg", {"local_steps": steps}, level="user", release="secure-aggregation"),
            small_problem.partition.sizes,
        )
        for steps in (1, 10)
    ]
    assert plans[0].noise_std == plans[1].noise_std
    assert plans[1].mu("local") == pytest.approx(math.sqrt(5) * plans[1].mu("secure-aggregation"))


def test_scaffold_gets_no_credit_from_secure_aggregation(small_problem):
    """Its control variates carry noise into later rounds."""
    trial = small.trial(small_problem, "dp-scaffold", level="user", release="secure-aggregation")
    plan = plan_of(trial, small_problem.partition.sizes)
    assert plan.actual_epsilon["local"] == plan.actual_epsilon["secure-aggregation"] <= 8.0
    local = trial.model_copy(update={"privacy": trial.privacy.model_copy(update={"release": "local"})})
    assert plan.noise_std == plan_of(local, small_problem.partition.sizes).noise_std


def test_with_credit_scaffold_would_be_caught():
    """Noise for a sum of ten, of which the others' nine hide a user: a third of what is needed locally. At a client's
    step size of 1000 the planted gradient outweighs the corrections, and two rounds' sums together show it."""
    privacy = PrivacySettings(epsilon=10.0, level="user", release="secure-aggregation")
    options = {"rounds": 4, "clients": 10, "repetitions": 600}
    hypers = {"client_learning_rate": 1e3}
    assert audit("dp-scaffold", privacy, hypers, noise_factor=1 / 3, **options).caught
    assert not audit("dp-scaffold", privacy, hypers, **options).caught


# ---- what cannot be run


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.levels == ("record",)])
def test_a_method_without_users_says_so(name, small_problem):
    with pytest.raises(UserError, match=rf"^level = 'user': {name} protects record level$"):
        check(small.trial(small_problem, name, level="user"), small_problem)


def test_fedfc_as_released_knows_no_users(small_problem):
    with pytest.raises(UserError, match=r"^as_released = True: dp-fedfc was released for record level only"):
        check(small.trial(small_problem, "dp-fedfc", {"as_released": True}, level="user"), small_problem)
