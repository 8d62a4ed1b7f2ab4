"""The head with a hidden layer: closed-form clipping against per-example gradients, and methods that run on it."""

import dataclasses
import math
import platform
from pathlib import Path

import numpy as np
import pytest
import small
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import varied_trials
from some_methods import with_marks

from trainables import models
from trainables.errors import UserError
from trainables.federation.denormals import flush_denormals
from trainables.federation.hosts import Hosts
from trainables.federation.pack import check, plan_of
from trainables.federation.problem import ProblemData
from trainables.federation.server import Server
from trainables.methods import METHODS
from trainables.models import compiled, kernels, per_example
from trainables.models.lanes import SHAPES
from trainables.models.mlp import MLPHead
from trainables.models.shard import Shard
from trainables.models.softmax import SoftmaxHead
from trainables.privacy.noise import Address

pytestmark = pytest.mark.usefixtures("both_kernels")


def case(head, sizes, lanes, seed=0, scale=1.0, dtype=torch.float64):
    """Rows of some clients, and weights and clips of some lanes."""
    rng = np.random.default_rng(seed)
    parts = [
        (rng.standard_normal((n, head.features)).astype(np.float32), rng.integers(0, head.classes, n)) for n in sizes
    ]
    theta = torch.from_numpy(scale * rng.standard_normal((lanes, head.dimension))).to(dtype)
    return Shard.build(parts, dtype=dtype), theta, torch.from_numpy(rng.choice([0.1, 1.0, 1e6], lanes)).to(dtype)


def by_autograd(head, shard, theta, clip):
    """Client by client, lane by lane, row by row: gradient sums, losses, how many rows were clipped."""
    total = torch.zeros(shard.clients, *theta.shape, dtype=torch.float64)
    losses, clipped = torch.zeros(total.shape[:2]), torch.zeros(total.shape[:2])
    for client, size in enumerate(shard.size.flatten().int().tolist()):
        for lane in range(len(theta)):
            for row in range(size):
                weights = theta[lane].double().requires_grad_()
                loss = head.loss(weights, shard.x[client, row].double(), shard.y[client, row])
                (g,) = torch.autograd.grad(loss, weights)
                total[client, lane] += g / max(1.0, (g.norm() / clip[lane].double()).item())
                losses[client, lane] += loss.item()
                clipped[client, lane] += bool(g.norm() > clip[lane])
    return total, losses, clipped


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    features=st.integers(1, 4),
    hidden=st.integers(1, 5),
    classes=st.integers(2, 4),
    lanes=st.sampled_from([1, 3, 17]),
    scale=st.sampled_from([0.0, 0.3, 3.0]),
    seed=st.integers(0, 10**6),
)
def test_clipping_in_closed_form(sizes, features, hidden, classes, lanes, scale, seed):
    """In float64 the closed form, vmap's per-example gradients and plain autograd agree to twelve digits; clients of
    several sizes are filled up with rows that count for nothing."""
    head = MLPHead(features, hidden, classes)
    shard, theta, clip = case(head, sizes, lanes, seed, scale)
    fast, found = head.clipped_gradient_sum(shard, theta, clip, diagnose=True)
    general = per_example.clipped_gradient_sum(head.loss, shard, theta, clip)[0]
    torch.testing.assert_close(fast, general, rtol=1e-10, atol=1e-12)
    some = slice(0, lanes, 8)
    slow, losses, clipped = by_autograd(head, shard, theta[some], clip[some])
    torch.testing.assert_close(fast[:, some], slow, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.loss[:, some].float(), losses, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.clipped[:, some].float(), clipped)
    without, nothing = head.clipped_gradient_sum(shard, theta, clip)
    assert nothing is None
    assert torch.equal(without, fast)


@given(
    sizes=st.lists(st.integers(1, 40) | st.sampled_from([kernels.TILE + 1, 300]), min_size=1, max_size=3),
    features=st.integers(1, 9),
    hidden=st.integers(1, 21),
    classes=st.integers(2, 20),
    lanes=st.sampled_from([1, 2, 6, 16, 17, 22]),
    scale=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    automatic=st.booleans(),
    own=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_single_precision_agrees_with_double(sizes, features, hidden, classes, lanes, scale, automatic, own, seed):
    """Shapes that fill neither vectors nor blocks, different weights per client, both kinds of clipping."""
    head = MLPHead(features, hidden, classes)
    shard, theta, clip = case(head, sizes, lanes, seed, scale, torch.float32)
    if own:
        theta = torch.stack([theta * (1 - 0.1 * client) for client in range(len(sizes))])
    found, seen = head.clipped_gradient_sum(shard, theta, clip, diagnose=True, automatic=automatic)
    exact, expected = head.clipped_gradient_sum(
        case(head, sizes, lanes, seed, scale)[0], theta.double(), clip.double(), diagnose=True, automatic=automatic
    )
    # no row's gradient is longer than its bound, to which short ones may be stretched, nor else than ||x|| ||W2|| in
    # the first layer and sqrt(2 (hidden + 1)) in the second; steep weights make the softmax steep, and errors larger
    norm = shard.norm[shard.norm < math.inf].max().item()
    longest = theta.abs().max().item() * math.sqrt(2 * hidden * classes) * norm + math.sqrt(2 * hidden + 2)
    bound = 1e-5 * max(sizes) * (clip.double() if automatic else clip.double().clamp(max=longest)) * max(1.0, scale)
    assert ((found - exact).abs() <= bound.view(1, -1, 1)).all()
    torch.testing.assert_close(seen.loss.double(), expected.loss.double(), rtol=1e-4 * max(1.0, scale), atol=1e-4)
    without, _ = head.clipped_gradient_sum(shard, theta, clip, automatic=automatic)
    assert torch.equal(without, found)


@pytest.mark.parametrize("rows", [1, 15, 16, kernels.TILE, kernels.TILE + 17])
@pytest.mark.parametrize("automatic", [False, True])
def test_a_lane_has_the_same_bits_alone_and_in_company(rows, automatic):
    """In C the last ones of LANES + MAX_NARROW go one by one, and in a longer pack they do not."""
    head, lanes = MLPHead(7, 19, 11), kernels.LANES + compiled.MAX_NARROW
    shard, theta, clip = case(head, (rows, 9), lanes + 1, dtype=torch.float32)
    assert [part.wide for part in compiled.layouts(lanes, 11)] == [True, False]
    assert [part.wide for part in compiled.layouts(lanes + 1, 11)] == [True]

    def results(few):
        gradient, seen = head.clipped_gradient_sum(shard, theta[few], clip[few], diagnose=True, automatic=automatic)
        one = Shard.build([(shard.x[0, :rows, :-1].numpy(), shard.y[0, :rows].numpy())])
        return *(part.movedim(1, 0) for part in (gradient, seen.loss, seen.clipped)), *head.evaluate(one, theta[few])

    whole = results(slice(0, lanes + 1))
    for few in (slice(0, lanes), slice(3, 4), slice(3, 5), slice(lanes, lanes + 1)):
        for some, all_of_them in zip(results(few), whole, strict=True):
            assert torch.equal(some, all_of_them[few])


def test_the_hyperbolic_tangent_is_as_accurate_as_it_says():
    """With W2 = 0 both classes are as likely, and the gradient in W2 is half of h."""
    steps = np.geomspace(1e-30, 20, 3000)
    given = np.concatenate([-steps, steps, np.linspace(-1, 1, 2001), [0.0, 1e30, -1e30]]).astype(np.float32)
    theta = torch.zeros(len(given), 2 + 4)
    theta[:, 1] = torch.from_numpy(given)
    row = Shard.build([(np.zeros((1, 1), dtype=np.float32), np.array([0]))])
    gradient, _ = MLPHead(1, 1, 2).clipped_gradient_sum(row, theta, torch.full((len(given),), 1e6))
    found, expected = 2 * gradient[0, :, 3].numpy(), np.tanh(given.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=3 * 2.0**-23, atol=0)


@pytest.mark.parametrize("lanes", [2, 16])
def test_nan_stays_nan_and_with_its_lane(lanes):
    head = MLPHead(3, 4, 3)
    shard, theta, clip = case(head, (5,), lanes, dtype=torch.float32)
    for place in (0, head.blocks[0], head.dimension - 1):
        broken = theta.clone()
        broken[1, place] = math.nan
        gradient, seen = head.clipped_gradient_sum(shard, broken, clip, diagnose=True)
        loss, correct = head.evaluate(shard, broken)
        assert gradient[0, 1].isnan().any()
        assert seen.loss[0, 1].isnan()
        assert loss[1].isnan()
        assert not correct[1].any()
        assert gradient[0, 0].isfinite().all()
        assert loss[0].isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_their_own_for_every_client(dtype):
    head = MLPHead(3, 4, 3)
    shard, theta, clip = case(head, (5, 2), 4, dtype=dtype)
    own = torch.stack([theta, 2 * theta])
    fast, _ = head.clipped_gradient_sum(shard, own, clip)
    torch.testing.assert_close(fast[0], head.clipped_gradient_sum(shard, theta, clip)[0][0])
    torch.testing.assert_close(fast[1], head.clipped_gradient_sum(shard, 2 * theta, clip)[0][1])
    near = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    slow = per_example.clipped_gradient_sum(head.loss, shard, own, clip)[0]
    torch.testing.assert_close(fast, slow, rtol=near, atol=near)


def test_rows_that_pad_a_client_may_have_no_gradient():
    """A plug-in head may divide by the length of a row, which is 0 for padding."""
    head = MLPHead(2, 3, 2)
    shard, theta, _ = case(head, (3, 5), 2)
    alone, _, _ = case(head, (3,), 2)

    def loss(weights, x, y):
        return (weights[: len(x)] * x / x.norm()).sum()

    clip = torch.full((2,), 0.5, dtype=theta.dtype)
    padded, values = per_example.clipped_gradient_sum(loss, shard, theta, clip)
    expected, own = per_example.clipped_gradient_sum(loss, alone, theta, clip)
    assert torch.equal(padded[0], expected[0])
    assert torch.equal(values.loss[0], own.loss[0])
    assert torch.isfinite(padded).all()


def test_a_head_wider_than_a_chunk_gets_the_fewest_rows():
    shape = SHAPES["cpu"]
    assert shape.rows(2 * shape.cells) == 64
    assert shape.rows(shape.cells // (1024 * shape.lanes)) == 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shards_longer_than_a_chunk(dtype):
    head = MLPHead(2, 200, 60)
    chunk = SHAPES["cpu"].rows(260)
    for rows in (chunk, chunk + 1, 2 * chunk + 3):
        shard, theta, _ = case(head, (rows,), 1, dtype=dtype)
        clip = torch.ones(1, dtype=dtype)
        general = per_example.clipped_gradient_sum(head.loss, shard, theta, clip)[0]
        near = {torch.float32: 1e-5 * rows, torch.float64: 1e-10}[dtype]
        torch.testing.assert_close(head.clipped_gradient_sum(shard, theta, clip)[0], general, rtol=0, atol=near)


@pytest.mark.parametrize("lanes", [1, 16])
def test_losses_of_many_classes_and_many_rows(lanes):
    """As of the linear head: a tile's softmax sums multiplied are more than a double holds."""
    head = MLPHead(2, 3, 300)
    shard, theta, clip = case(head, (kernels.TILE + 40,), lanes, scale=0.0, dtype=torch.float32)
    _, seen = head.clipped_gradient_sum(shard, theta, clip, diagnose=True)
    assert seen.loss[0].tolist() == pytest.approx([(kernels.TILE + 40) * math.log(300)] * lanes, rel=1e-5)
    assert head.evaluate(shard, theta)[0].tolist() == pytest.approx([math.log(300)] * lanes, rel=1e-5)


@pytest.mark.parametrize("head", [MLPHead(3, 4, 3), SoftmaxHead(3, 4)], ids=["mlp", "softmax"])
def test_weights_that_were_written_to_are_others(head):
    """The layout of weights is cached for the same values, not merely for the same tensor object."""
    shard, theta, clip = case(head, (9,), 3, dtype=torch.float32)
    before, _ = head.clipped_gradient_sum(shard, theta, clip)
    theta.mul_(2)
    after, _ = head.clipped_gradient_sum(shard, theta, clip)
    fresh, _ = head.clipped_gradient_sum(shard, theta.clone(), clip)
    assert torch.equal(after, fresh)
    assert not torch.equal(after, before)
    of_one, _ = head.clipped_gradient_sum(shard, theta.unsqueeze(0), clip)
    assert torch.equal(of_one, after)
    with torch.inference_mode():
        assert torch.equal(head.clipped_gradient_sum(shard, theta.clone(), clip)[0], after)


OTHERS = {"x86_64": ("x86-64", "haswell"), "aarch64": ("armv8-a",)}
"""Processors whose vectors are shorter than this one's may be, and that it can stand in for."""


@pytest.mark.parametrize("processor", OTHERS.get(platform.machine(), ()))
def test_compiled_for_lesser_processors(processor, both_kernels, monkeypatch, tmp_path):
    if both_kernels == "torch":
        pytest.skip("nothing is compiled")
    if processor == "haswell" and not {"avx2", "fma"} <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip("this processor knows less")
    flags = tuple(f"-march={processor}" if flag == "-march=native" else flag for flag in kernels.FLAGS)
    monkeypatch.setattr(kernels, "FLAGS", flags)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = kernels.library.__wrapped__()
    monkeypatch.setattr(kernels, "library", lambda: library)
    for test in (test_the_hyperbolic_tangent_is_as_accurate_as_it_says, test_evaluate_against_numpy):
        test()
    test_a_lane_has_the_same_bits_alone_and_in_company(kernels.TILE + 17, False)
    head = MLPHead(5, 13, 6)
    shard, theta, clip = case(head, (200, 3), 18, scale=3.0, dtype=torch.float32)
    found, _ = head.clipped_gradient_sum(shard, theta, clip)
    exact, _ = head.clipped_gradient_sum(case(head, (200, 3), 18, scale=3.0)[0], theta.double(), clip.double())
    assert ((found - exact).norm(dim=2) <= 1e-5 * 200 * clip.clamp(max=100)).all()


def test_a_row_far_away_is_clipped_all_the_same():
    """A model that is all but sure, so that what comes back to the first layer is too small for its square to be more
    than nothing; and a row so long that its gradient there is what counts."""
    head = MLPHead(1, 64, 2)
    row = Shard.build([(np.array([[1e9]], dtype=np.float32), np.array([0]))])
    theta, clip = torch.zeros(2, head.dimension), torch.tensor([1e-12, 1e-13])
    second = theta[:, head.blocks[0] :].view(2, 65, 2)
    second[:, :64] = torch.tensor([0.005, -0.005])
    second[:, 64, 0] = 41.3
    with flush_denormals():
        gradient, _ = head.clipped_gradient_sum(row, theta, clip)
    assert gradient[0].norm(dim=1).tolist() == pytest.approx(clip.tolist(), rel=1e-5)


@given(st.floats(-4, 4), st.sampled_from([1e-3, 0.1, 1.0, 10.0]), st.integers(0, 10**6))
def test_no_record_moves_the_sum_by_more_than_the_clip(magnitude, clip, seed):
    """In float32, as it runs, for rows and weights of any size."""
    head = MLPHead(3, 4, 3)
    shard, theta, _ = case(head, (1,), 5, seed, 10**magnitude, torch.float32)
    fast, _ = head.clipped_gradient_sum(shard, theta, torch.full((5,), clip))
    assert fast.double().norm(dim=2).max() <= clip * (1 + 1e-5)


def test_evaluate_against_numpy():
    head = MLPHead(5, 7, 4)
    shard, theta, _ = case(head, (300,), 18, dtype=torch.float32)
    loss, correct = head.evaluate(shard, theta)
    x, y = shard.x[0].double().numpy(), shard.y[0].numpy()
    for lane in range(18):
        weights = theta[lane].double().numpy()
        W1, W2 = weights[: 6 * 7].reshape(6, 7), weights[6 * 7 :].reshape(8, 4)
        scores = np.hstack([np.tanh(x @ W1), np.ones((300, 1))]) @ W2
        assert (correct[lane].numpy() == (scores.argmax(1) == y)).mean() > 0.99, "a row may lie on the border"
        expected = np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(300), y])
        assert loss[lane].item() == pytest.approx(expected, rel=1e-5)


def test_ties_count_as_wrong():
    head = MLPHead(2, 3, 4)
    shard, _, _ = case(head, (9,), 1, dtype=torch.float32)
    loss, correct = head.evaluate(shard, torch.zeros(1, head.dimension))
    assert not correct.any()
    assert loss.item() == pytest.approx(math.log(4))


def test_initial_weights():
    """Every layer N(0, s^2), s = 0.5 sqrt(2 / (inputs + outputs)); the layers stand one after the other."""
    head = models.parse("mlp:40", features=60, classes=10)
    assert head == MLPHead(60, 40, 10)
    assert head.blocks == (61 * 40, 41 * 10)
    assert head.dimension == sum(head.blocks)
    first, second = head.initial(3).split(head.blocks)
    assert first.std().item() == pytest.approx(0.5 * math.sqrt(2 / 101), rel=0.1)
    assert second.std().item() == pytest.approx(0.5 * math.sqrt(2 / 51), rel=0.1)
    assert torch.equal(head.initial(3), head.initial(3))
    assert not torch.equal(head.initial(3), head.initial(4))


@pytest.mark.parametrize("text", ["mlp:0", "mlp", "mlp:", "mlp:-3", "mlp:1.5", "mlp:4:4", "softmax:3", "tree", ""])
def test_unknown_models_are_named(text):
    with pytest.raises(UserError, match=rf"^model = '{text}'"):
        models.parse(text, features=3, classes=2)


# ---- methods on it


def on_mlp(of):
    return dataclasses.replace(of, spec=of.spec.model_copy(update={"model": "mlp:5"}))


every_method = pytest.mark.parametrize(
    "name", with_marks(name for name, method in METHODS.items() if method.accepts(MLPHead(12, 5, 4)))
)


@every_method
def test_lanes_hosts_and_restarts_leave_the_same_bits(name):
    of = on_mlp(small.problem("synthetic-frozen:250,100,12,4"))
    small.assert_same_bits(varied_trials(name, of, 18), of)


def test_layers_that_are_clipped_one_by_one_come_back_in_their_places(small_problem):
    """DP-FedAdamW as released: alone and with other lanes."""
    of = on_mlp(small_problem)
    trials = [
        small.trial(of, "dp-fedadamw", {"as_released": True, "client_learning_rate": rate}, rounds=8, clip=0.5)
        for rate in (0.001, 0.01, 0.1)
    ]
    small.assert_same_bits(trials, of)


@pytest.mark.parametrize("level", ["record", "user"])
def test_dp_fedgd_by_hand(level, small_problem):
    """Four rounds, example by example with autograd in float64."""
    of = on_mlp(small_problem)
    trial = small.trial(of, "dp-fedgd", rounds=6, level=level, clip=0.5)
    server = Server(Hosts(1))
    server.open([trial], ProblemData.of(of))
    std = plan_of(trial, of.partition.sizes).noise_std["gradient"]
    clip = torch.tensor([trial.privacy.clip if level == "record" else math.inf], dtype=torch.float64)
    W = of.model.initial(trial.seed).double()
    for t in (1, 2, 3, 4):
        releases = []
        for client, rows in enumerate(of.partition.rows):
            shard = Shard.build([(of.data.x_train[rows], of.data.y_train[rows])], dtype=torch.float64)
            total = by_autograd(of.model, shard, W.unsqueeze(0), clip)[0][0, 0]
            noise = std * torch.from_numpy(Address(trial.seed, client, t, 0, "gradient").normal(len(W))).double()
            mean = total / len(rows)
            user = mean / max(1.0, (mean.norm() / trial.privacy.clip).item()) + noise
            releases.append((total + noise) / len(rows) if level == "record" else user)
        W = W - 0.1 * torch.stack(releases).mean(0)
        server.advance(t)
    torch.testing.assert_close(server.theta[0].double(), W, rtol=0, atol=1e-5 * W.abs().max().item())


def test_a_method_that_needs_a_linear_head_says_so(small_problem):
    of = on_mlp(small_problem)
    with pytest.raises(UserError, match=r"^model = 'mlp:5': dp-fedfc cannot train it; the method needs softmax, "):
        check(small.trial(of, "dp-fedfc"), of)
