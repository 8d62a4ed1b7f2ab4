"""Centred features and size weights: they agree with the slow twin, are accounted and audited, on any hosts."""

import math

import numpy as np
import pytest
import small
import torch
import twin
from twin_agreement import twin_of

from trainables.audit.paired import audit
from trainables.errors import UserError
from trainables.federation.pack import check, pack_group, plan_of
from trainables.federation.trial_spec import Preprocess
from trainables.methods import METHODS
from trainables.models.centres import Centres
from trainables.models.shard import Shard
from trainables.privacy.gaussian import mu_of
from trainables.privacy.plan import LEVELS, PrivacySettings

BETTER = {"preprocess": Preprocess(center=0.1, bound=3.0), "aggregate": "size"}
KINDS = {
    "dp-fedgd": {},
    "dp-scaffold": {"local_steps": 2},
    "dp-fedfc": {},
    "dp-ls": {"learning_rate": 0.2, "gamma": 5.0},
    "dp-fedsofim": {},
    "dp-fednew-fc": {},
    "dp-ftrl": {},
    "dp-fedadamw": {"local_steps": 2, "sampling_rate": 0.2, "participation": 0.6},
}
"""Every kind of client program."""


def better(name, hypers=None, **options):
    trial = small.trial(small.problem(), name, hypers or KINDS[name], **options)
    return trial.model_copy(update=BETTER)


@pytest.mark.parametrize("name", KINDS)
def test_agrees_with_the_twin(name):
    trial, of = better(name, rounds=25, every=25), small.problem()
    weights, _ = small.weights_after(20, [trial], of)
    slow = twin_of(trial, of).weights[-1]
    np.testing.assert_allclose(weights[0], slow, rtol=0, atol=2e-5 * np.abs(slow).max())
    assert not np.allclose(slow, twin_of(trial.model_copy(update={"aggregate": "uniform"}), of).weights[-1], atol=1e-3)


def test_users():
    trial, of = better("dp-fedgd", rounds=25, every=25, level="user"), small.problem()
    _, server = small.weights_after(1, [trial], of)
    clients = [
        twin.Client(
            i,
            of.data.x_train[rows],
            of.data.y_train[rows],
            plan_of(trial, of.partition.sizes).noise_std,
            5.0,
            42,
            "user",
        )
        for i, rows in enumerate(of.partition.rows)
    ]
    np.testing.assert_allclose(server._work.centre[0], twin.centred(clients, 3.0)[1], rtol=1e-5)


@pytest.mark.parametrize("name", ["dp-fedgd", "dp-scaffold", "dp-fedfc"])
def test_the_same_bits_whatever_the_hosts(name):
    rate = METHODS[name].hyperparameters[0]
    hypers = [{**KINDS[name], rate.name: rate.default * factor} for factor in (0.3, 1.0, 2.0)]
    small.assert_same_bits([better(name, h) for h in hypers], small.problem())


def test_centred_trials_share_a_pack_across_seeds_and_budgets():
    trial = better("dp-fedgd")
    share = Preprocess(center=0.2, bound=3.0)
    alike = ({"seed": 1}, {"privacy": PrivacySettings(epsilon=1.0)}, {"preprocess": share})
    apart = ({"aggregate": "uniform"}, {"preprocess": Preprocess(center=0.1, bound=4.0)}, {"preprocess": Preprocess()})
    for change in (*alike, *apart):
        other = trial.model_copy(update=change)
        assert (pack_group(trial) == pack_group(other)) == (change in alike)
        assert trial.key != other.key


# ---- the account


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_centre_is_paid_for(name, level):
    """The centre spends its share of mu squared, and the actual eps of all releases is still the claimed one."""
    if level not in METHODS[name].levels:
        pytest.skip("not at this level")
    trial = small.trial(small.problem(), name, {}, level=level).model_copy(update=BETTER)
    plan = plan_of(trial, (30, 60, 200, 100, 210))
    assert 0.99 * 8.0 < plan.actual_epsilon["local"] <= 8.0 * (1 + 1e-9)
    if not any(event.sampling < 1 for event in plan.events):
        spent = (3.0 * trial.privacy.adjacency_factor / plan.noise_std["centre"]) ** 2
        assert spent == pytest.approx(0.1 * mu_of(8.0, 1e-5) ** 2, rel=1e-5)


def test_size_weights_spare_the_smallest_client_its_penalty():
    """In a sum weighted by size every record weighs the same: the account is that of equal clients. With equal weights
    the smallest of sizes 50, 100, ... sets the noise, max(1/|D|) / ||1/|D||| of it."""
    sizes = (50, 100, 150, 200, 250)
    trial = small.trial(small.problem(), "dp-fedgd", release="secure-aggregation")
    uniform, weighted = (plan_of(trial.model_copy(update={"aggregate": a}), sizes) for a in ("uniform", "size"))
    equal = plan_of(trial, (100,) * 5)
    assert weighted.noise_std["gradient"] == equal.noise_std["gradient"]
    inverse = 1 / np.array(sizes)
    penalty = inverse.max() / np.linalg.norm(inverse) * math.sqrt(5)
    assert uniform.noise_std["gradient"] == pytest.approx(equal.noise_std["gradient"] * penalty, rel=1e-6)


def test_size_weights_of_users_follow_the_largest():
    sizes = (50, 100, 150, 200, 250)
    trial = small.trial(small.problem(), "dp-fedgd", release="secure-aggregation", level="user")
    weighted, equal = (plan_of(trial.model_copy(update={"aggregate": a}), sizes) for a in ("size", "uniform"))
    penalty = 250 / np.linalg.norm(sizes) * math.sqrt(5)
    assert weighted.noise_std["gradient"] == pytest.approx(equal.noise_std["gradient"] * penalty, rel=1e-6)


@pytest.mark.parametrize("wrong", [{"center": 1.0}, {"center": -0.1}, {"center": 0.1, "bound": 0.0}])
def test_nonsense_is_refused(wrong):
    trial = small.trial(small.problem(), "dp-fedgd").model_copy(update={"preprocess": Preprocess(**wrong)})
    with pytest.raises(UserError, match=r"center|bound"):
        check(trial, small.problem())


# ---- the model that comes of it


@pytest.mark.parametrize("model", ["softmax", "mlp:3"])
def test_weights_for_features_as_they_came(model):
    of = small.problem(model=model)
    rng = np.random.default_rng(0)
    theta = torch.from_numpy(rng.normal(size=(4, of.model.dimension)).astype(np.float32))
    centre = rng.normal(size=of.data.features).astype(np.float32)
    moved = Shard.build([(of.x_eval - centre, of.y_eval)])
    raw = Centres.of(np.tile(centre, (4, 1)), "cpu").for_raw_features(theta, of.model.blocks[0])
    there, back = of.model.evaluate(moved, theta)[0], of.model.evaluate(Shard.build([(of.x_eval, of.y_eval)]), raw)[0]
    torch.testing.assert_close(there, back, rtol=1e-4, atol=1e-4)


# ---- the audit


def test_the_audit_hears_the_centre():
    """A record that counts as nothing moves the centre by its whole bound: half the noise is caught, the plan's not."""
    privacy = PrivacySettings(epsilon=5.0, adjacency="zero-out")
    options = {"center": 0.4, "aggregate": "size", "rounds": 1}
    honest = audit("dp-fedgd", privacy, {}, repetitions=300, **options)
    assert not honest.caught
    assert audit("dp-fedgd", privacy, {}, repetitions=500, noise_factor=0.4, **options).caught


@pytest.mark.parametrize("release", ["local", "secure-aggregation"])
def test_the_audit_of_size_weights(release):
    privacy = PrivacySettings(epsilon=5.0, release=release)
    assert not audit("dp-fedgd", privacy, {}, aggregate="size", repetitions=600).caught
    assert audit("dp-fedgd", privacy, {}, aggregate="size", repetitions=800, noise_factor=0.5).caught
