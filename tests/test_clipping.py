"""Automatic clipping: against plain loops on every head, what privacy rests on, and what cannot be run."""

import math

import numpy as np
import pytest
import small
import torch
import twin
from kernel_cases import by_loops, random_case
from twin_agreement import twin_of

from trainables.audit.paired import audit
from trainables.errors import UserError
from trainables.federation.pack import check, pack_group, plan_of
from trainables.methods import METHODS
from trainables.models import MLPHead, per_example
from trainables.models.glm import Multinomial, Poisson
from trainables.models.shard import Shard
from trainables.models.softmax import SoftmaxHead
from trainables.privacy.plan import PrivacySettings

AUTOMATIC = {"clipping": "automatic"}
HEADS = [SoftmaxHead(5, 3), MLPHead(5, 4, 3), Multinomial(5, 3), Poisson(5)]


def brought(g, C):
    """The formula."""
    return C * g / (np.linalg.norm(g) + 0.01)


@pytest.mark.parametrize("lanes", [1, 18])
@pytest.mark.parametrize("scale", [0.1, 5.0])
def test_the_softmax_head_agrees_with_loops(both_kernels, monkeypatch, lanes, scale):
    """One lane alone, and a wide block plus two lanes; confident models have tiny gradients."""
    monkeypatch.setattr(twin, "clipped", brought)
    x, y, theta = random_case(150, 5, 3, lanes, scale=scale)
    clip = np.resize([0.5, 20.0], lanes).astype(np.float32)
    head, shard = SoftmaxHead(5, 3), Shard.build([(x, y)], rows=160)  # ten of them filling
    found, seen = head.clipped_gradient_sum(
        shard, torch.from_numpy(theta), torch.from_numpy(clip), diagnose=True, automatic=True
    )
    again, _ = head.clipped_gradient_sum(shard, torch.from_numpy(theta), torch.from_numpy(clip), automatic=True)
    assert torch.equal(found, again)
    for lane in range(lanes):
        slow, losses, _ = by_loops(x, y, theta[lane].astype(np.float64).reshape(6, 3), clip[lane])
        np.testing.assert_allclose(found[0, lane].view(6, 3), slow, rtol=0, atol=3e-5 * clip[lane])
        assert seen.loss[0, lane].item() == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_every_head_agrees_with_the_definition(head):
    """Single rows show their own gradients; two clients, the smaller one padded."""
    rng = np.random.default_rng(0)
    parts = [(rng.standard_normal((n, 5)).astype(np.float32), rng.integers(0, 3, n)) for n in (7, 4)]
    theta = torch.from_numpy(rng.standard_normal((2, head.dimension)))
    clip = torch.tensor([0.3, 30.0], dtype=torch.float64)
    found, _ = head.clipped_gradient_sum(
        Shard.build(parts, dtype=torch.float64), theta, clip, diagnose=True, automatic=True
    )
    for client, (x, y) in enumerate(parts):
        total = np.zeros((2, head.dimension))
        for row, label in zip(x, y, strict=True):
            one = Shard.build([(row[None], label[None])], dtype=torch.float64)
            whole, _ = head.clipped_gradient_sum(one, theta, torch.full_like(clip, 1e300))
            total += [brought(g, C) for g, C in zip(whole[0].numpy(), clip.numpy(), strict=True)]
        np.testing.assert_allclose(found[client], total, rtol=1e-6, atol=1e-9)


def test_any_loss_agrees_with_the_closed_form():
    rng = np.random.default_rng(1)
    head = MLPHead(4, 3, 3)
    shard = Shard.build([(rng.standard_normal((9, 4)).astype(np.float32), rng.integers(0, 3, 9))], dtype=torch.float64)
    theta, clip = torch.from_numpy(rng.standard_normal((2, head.dimension))), torch.tensor([0.3, 30.0]).double()
    slow = per_example.clipped_gradient_sum(head.loss, shard, theta, clip, automatic=True)[0]
    fast, _ = head.clipped_gradient_sum(shard, theta, clip, automatic=True)
    torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("logits", [0.0, 9.0, 60.0])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e6])
def test_nothing_is_longer_than_the_clip(logits, size, device):
    """What privacy rests on, however sure the model and however long the row."""
    x, W = np.array([[size]], dtype=np.float32), np.zeros((2, 3), dtype=np.float32)
    W[0] = [logits / size, 0, -0.1 / size]
    weights = torch.from_numpy(W.reshape(1, 6)).to(device)
    for label, clip in ((0, 1e-3), (1, 1.0), (2, 100.0)):
        shard, bound = Shard.build([(x, np.array([label]))], device), torch.tensor([clip], device=device)
        found, _ = SoftmaxHead(1, 3).clipped_gradient_sum(shard, weights, bound, automatic=True)
        assert torch.linalg.vector_norm(found) <= clip * (1 + 1e-5)


@pytest.mark.parametrize("name", ["dp-fedgd", "dp-ftrl", "dp-fedavg"])
def test_agrees_with_the_twin(name, monkeypatch):
    """Through the whole engine: the twin brings gradients to the clip by the formula, with the plan's own noise."""
    monkeypatch.setattr(twin, "clipped", brought)
    of = small.problem(data="synthetic-frozen:60,20,12,4", clients=3)
    hypers = {"learning_rate": 0.1} if name != "dp-fedavg" else {"local_steps": 2, "client_learning_rate": 0.05}
    trial = small.trial(of, name, hypers, rounds=4, every=2, clip=1.0, **AUTOMATIC)
    slow = twin_of(trial, of)
    fast, _ = small.weights_after(3, [trial], of)
    want = slow.weights[2]
    np.testing.assert_allclose(fast.reshape(want.shape), want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_the_account_is_that_of_plain_clipping():
    of = small.problem()
    plain, automatic = (small.trial(of, "dp-fedgd", clipping=how) for how in ("plain", "automatic"))
    assert plan_of(plain, of.partition.sizes).noise_std == plan_of(automatic, of.partition.sizes).noise_std
    assert plain.key != automatic.key
    assert pack_group(plain) != pack_group(automatic)


def test_a_trial_is_read_back_from_json():
    automatic = small.trial(small.problem(), "dp-fedgd", **AUTOMATIC)
    assert type(automatic).model_validate_json(automatic.model_dump_json()) == automatic


@pytest.mark.parametrize("name", ["dp-fedgd", "dp-fedsam", "dp-fednewton"])
def test_lanes_hosts_and_restarts_leave_the_same_bits(name):
    model = "softmax" if name != "dp-fednewton" else "multinomial"
    of = small.problem(data="synthetic-frozen:90,20,5,3", clients=3, model=model)
    assert METHODS[name].accepts(of.model)
    options = {"epsilon": math.inf if name == "dp-fedsam" else 8.0, **AUTOMATIC}  # samples take long to price
    trials = [small.trial(of, name, seed=seed, clip=clip, **options) for seed in (1, 2) for clip in (1.0, 5.0)]
    small.assert_same_bits(trials, of)


def test_the_audit_sees_no_more_than_is_claimed_and_half_the_noise():
    claim = PrivacySettings(epsilon=5.0, **AUTOMATIC)
    honest = audit("dp-fedgd", claim, {}, repetitions=800)
    assert 0.5 * honest.claimed_mu < honest.mu < honest.claimed_mu
    assert audit("dp-fedgd", claim, {}, repetitions=800, noise_factor=0.5).caught


# ---- what cannot be run


@pytest.mark.parametrize(
    ("name", "hypers", "privacy", "sentence"),
    [
        ("dp-fedgd", {}, {"level": "user"}, r"^clipping = 'automatic' needs level = 'record'"),
        ("dp-fedadamw", {"as_released": True}, {}, r"^clipping = 'automatic' excludes as_released: dp-fedadamw's"),
    ],
)
def test_where_it_cannot_be_had_one_sentence_says_so(name, hypers, privacy, sentence):
    of = small.problem()
    with pytest.raises(UserError, match=sentence):
        check(small.trial(of, name, hypers, **AUTOMATIC, **privacy), of)


def test_a_head_that_knows_plain_clipping_alone_is_refused():
    class Plain(SoftmaxHead):
        def clipped_gradient_sum(self, shard, theta, clip, *, diagnose=False):
            return super().clipped_gradient_sum(shard, theta, clip, diagnose=diagnose)

    of = small.problem(clients=4)
    object.__setattr__(of, "model", Plain(12, 4))
    try:
        with pytest.raises(UserError, match=r"^clipping = 'automatic': model = 'softmax' supports only plain"):
            check(small.trial(of, "dp-fedgd", **AUTOMATIC), of)
        small.weights_after(2, [small.trial(of, "dp-fedgd")], of)  # plain clipping still runs
    finally:
        del vars(of)["model"]
