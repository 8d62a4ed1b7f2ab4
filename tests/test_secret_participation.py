"""Users that take part in secret: twin, account against dp-accounting, contract, audit, and what cannot be run."""

import math

import numpy as np
import pytest
import small
import twin
import twin_agreement
import twin_user
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

from trainables.audit.paired import audit
from trainables.errors import UserError
from trainables.federation.pack import check, pack_group, plan_of
from trainables.methods import METHODS
from trainables.methods.local_steps import UserLocalSteps
from trainables.privacy.gaussian import epsilon_of
from trainables.privacy.noise import Address
from trainables.privacy.participation import takes_part
from trainables.privacy.plan import PrivacySettings

Q = 0.4
USERS = {"level": "user", "release": "secure-aggregation", "adjacency": "zero-out"}
SECRET = {**USERS, "secret_participation": Q}
RELATION = {
    "replace-one": privacy_accountant.NeighboringRelation.REPLACE_ONE,
    "zero-out": privacy_accountant.NeighboringRelation.REPLACE_SPECIAL,
}


def one_answer(client, W, t, h, server):
    """McMahan et al. 2018: the update or nothing, and noise, over q: summed and divided by n that is over q n."""
    y = W
    for _ in range(h["local_steps"]):
        y = y - h["client_learning_rate"] * twin_user.mean_gradient(client, y)
    heads = Address(client.seed, client.number, t, 0, "takes part").generator().random() < Q
    return (heads * twin.clipped(y - W, client.clip) + client.noise(W.shape, t)) / Q


def test_agrees_with_the_twin(monkeypatch):
    monkeypatch.setitem(twin_user.METHODS, "dp-fedavg", (one_answer, twin.dp_fedavg))
    of = small.problem(data="synthetic-frozen:60,20,12,4", clients=3)
    hypers = {"local_steps": 2, "client_learning_rate": 0.05, "server_learning_rate": 0.5}
    trial = small.trial(of, "dp-fedavg", hypers, rounds=11, every=10, clip=0.1, **SECRET)
    slow = twin_agreement.twin_of(trial, of, twin_user.train)
    fast, server = small.weights_after(10, [trial], of)
    want = slow.weights[9]
    np.testing.assert_allclose(fast.reshape(want.shape), want, rtol=0, atol=1e-5 * np.abs(want).max())
    noise = server.results[trial.key].metrics["noise_norm"][10]
    assert noise == pytest.approx(slow.diagnostics["noise_norm", 10] / Q, rel=1e-5)
    fallen = {takes_part(trial.seed, client, t, Q) for client in range(3) for t in range(1, 11)}
    assert fallen == {True, False}, "both are seen"


def test_coins():
    """As often heads as they should be, and each its own: by seed, client and round."""
    fallen = np.array([[[takes_part(s, c, t, Q) for t in range(20)] for c in range(20)] for s in range(5)])
    assert fallen.mean() == pytest.approx(Q, abs=4 * math.sqrt(Q * (1 - Q) / fallen.size))
    for axis in range(3):
        assert (np.diff(fallen.astype(int), axis=axis) != 0).any()


# ---- the account


def by_dp_accounting(multiplier, rounds, adjacency, rate=Q):
    accountant = PLDAccountant(RELATION[adjacency], value_discretization_interval=1e-3)
    accountant.compose(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier)), rounds)
    return accountant.get_epsilon(1e-5)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_the_actual_epsilon_is_the_claimed_one(adjacency, small_problem):
    """In the sum of n users the noise is sqrt(n) times one's, against an update of at most C."""
    privacy = {**SECRET, "adjacency": adjacency, "epsilon": 2.0, "clip": 0.5}
    trial = small.trial(small_problem, "dp-fedavg", rounds=10, **privacy)
    plan = plan_of(trial, small_problem.partition.sizes)
    multiplier = plan.noise_std["gradient"] * math.sqrt(5) / 0.5
    assert by_dp_accounting(multiplier, 10, adjacency) == pytest.approx(2.0, rel=5e-3)
    assert plan.actual_epsilon["secure-aggregation"] <= 2.0
    everyone = {**privacy, "secret_participation": 1.0}
    always = plan_of(small.trial(small_problem, "dp-fedavg", rounds=10, **everyone), small_problem.partition.sizes)
    assert plan.noise_std["gradient"] < 0.8 * always.noise_std["gradient"], "the secret is worth something"
    # to one who knows who takes part it is worth nothing, and so it is where every answer is seen
    moves = {"replace-one": 2, "zero-out": 1}[adjacency]
    assert plan.unsampled["secure-aggregation"] == pytest.approx(epsilon_of(moves * math.sqrt(10) / multiplier, 1e-5))
    alone = epsilon_of(moves * math.sqrt(10 * 5) / multiplier, 1e-5)
    assert plan.actual_epsilon["local"] == pytest.approx(alone, rel=5e-3)
    assert plan.actual_epsilon["local"] >= alone * (1 - 1e-3)


def test_secret_participation_is_part_of_key_and_pack_group(small_problem):
    plain = small.trial(small_problem, "dp-fedavg", **USERS)
    secret = small.trial(small_problem, "dp-fedavg", **SECRET)
    assert type(plain).model_validate_json(secret.model_dump_json()) == secret
    assert len({pack_group(plain), pack_group(secret)}) == len({plain.key, secret.key}) == 2


# ---- the contract, and the audit


def test_lanes_hosts_and_restarts_leave_the_same_bits(small_problem):
    trials = [
        small.trial(small_problem, "dp-fedavg", {"server_learning_rate": rate}, seed=seed, epsilon=math.inf, **SECRET)
        for seed in (1, 2)
        for rate in (0.5, 1.0)
    ]
    small.assert_same_bits(trials, small_problem)


def test_the_audit():
    """Secret samples have the plain bound alone: weak, where delta is small."""
    claim = PrivacySettings(epsilon=1.0, delta=0.05, **{**SECRET, "secret_participation": 0.9})
    honest = audit("dp-fedavg", claim, {}, rounds=1, repetitions=1200)
    assert honest.sampled
    assert 0 < honest.epsilon < 1.0
    assert audit("dp-fedavg", claim, {}, rounds=1, repetitions=1200, noise_factor=0.5).caught


# ---- what cannot be run


@pytest.mark.parametrize(
    ("name", "privacy", "sentence"),
    [
        (
            "dp-fedavg",
            {"level": "record"},
            "secret_participation = 0.4 needs level = 'user'; the level is 'record'",
        ),
        (
            "dp-fedavg",
            {"release": "local"},
            "secret_participation = 0.4 needs release = 'secure-aggregation'",
        ),
        ("dp-fedgd", {}, "secret_participation = 0.4 is not available for dp-fedgd, in which all clients take"),
        ("dp-scaffold", {}, "secret_participation = 0.4 is not available for dp-scaffold"),
        ("dp-adafedprox", {}, "level = 'user': dp-adafedprox protects record level$"),
    ],
)
def test_where_it_cannot_be_had_one_sentence_says_so(name, privacy, sentence, small_problem):
    with pytest.raises(UserError, match=f"^{sentence}"):
        check(small.trial(small_problem, name, **{**SECRET, **privacy}), small_problem)


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, math.nan])
def test_a_probability_is_one(value):
    with pytest.raises(UserError, match="secret_participation"):
        PrivacySettings(epsilon=1.0, secret_participation=value).check()


def test_only_programs_that_say_so_take_part_in_secret():
    users = {
        name: method.program(method.check({}), "user") for name, method in METHODS.items() if "user" in method.levels
    }
    assert [name for name, program in users.items() if program.allows_secret_participation] == ["dp-fedavg"]


def test_a_program_that_does_not_keep_the_secret_fails(small_problem, monkeypatch):
    """It has less noise than it needs: better no result."""
    monkeypatch.setattr(UserLocalSteps, "round", lambda self, client, theta: theta + client.noise("gradient"))
    with pytest.raises(RuntimeError, match="reveals who takes part"):
        small.weights_after(1, [small.trial(small_problem, "dp-fedavg", epsilon=math.inf, **SECRET)], small_problem)
