"""The laned kernel: closed-form clipping and evaluation against plain loops, and sums that know no order."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_cases import by_loops, random_case

from trainables.federation.exact_sum import GRID, from_grid, to_grid
from trainables.models import compiled, kernels, softmax
from trainables.models.lanes import SHAPES, from_blocks, to_blocks
from trainables.models.shard import Diagnostics, Shard
from trainables.models.softmax import SoftmaxHead

pytestmark = pytest.mark.usefixtures("both_kernels")


def clipped_sum(x, y, theta, clip, classes, diagnose=False):
    """Of one client: the gradient (lanes, d), and the diagnostics of every lane."""
    head = SoftmaxHead(x.shape[1], classes)
    clips = torch.as_tensor(clip, dtype=torch.float32)
    total, found = head.clipped_gradient_sum(Shard.build([(x, y)]), torch.from_numpy(theta), clips, diagnose=diagnose)
    return total[0], Diagnostics(found.loss[0], found.clipped[0]) if found else None


def assert_matches_loops(x, y, theta, clip, classes):
    fast, diagnostics = clipped_sum(x, y, theta, clip, classes, diagnose=True)
    for lane in range(len(theta)):
        W = theta[lane].astype(np.float64).reshape(x.shape[1] + 1, classes)
        slow, losses, too_long = by_loops(x, y, W, clip[lane])
        got = fast[lane].numpy().reshape(slow.shape)
        np.testing.assert_allclose(got, slow, rtol=0, atol=1e-5 * max(1.0, np.abs(slow).max(), clip[lane]))
        assert diagnostics.loss[lane].item() == pytest.approx(losses, rel=1e-5, abs=1e-5 * len(y))
        assert diagnostics.clipped[lane].item() == pytest.approx(too_long, abs=0.01 * len(y)), "a few lie on the border"


@given(
    rows=st.integers(1, 40),
    features=st.integers(1, 12),
    classes=st.integers(2, 9),
    lanes=st.integers(1, 20),
    scale=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    seed=st.integers(0, 10**6),
)
def test_clipped_gradient_sum(rows, features, classes, lanes, scale, seed):
    x, y, theta = random_case(rows, features, classes, lanes, seed, scale)
    clip = np.random.default_rng(seed).choice([0.5, 1.0, 5.0, 1e6], lanes)
    assert_matches_loops(x, y, theta, clip, classes)


def test_the_extremes_clip_all_and_none():
    x, y, theta = random_case(50, 4, 3, 2, scale=0.1)
    _, diagnostics = clipped_sum(x, y, theta, [1e-6, 1e6], 3, diagnose=True)
    assert diagnostics.clipped.tolist() == [50, 0]


def test_one_row_by_hand():
    """x = (3, 1), two classes, W = 0: p - y = (-1/2, 1/2), norm sqrt(10) / sqrt(2) = sqrt(5), so a clip of 1 divides by
    sqrt(5); the loss is ln 2."""
    x, y = np.array([[3.0]], dtype=np.float32), np.array([0])
    fast, diagnostics = clipped_sum(x, y, np.zeros((2, 4), dtype=np.float32), [1.0, 100.0], 2, diagnose=True)
    whole = np.array([-1.5, 1.5, -0.5, 0.5])
    np.testing.assert_allclose(fast.numpy(), [whole / math.sqrt(5), whole], rtol=1e-6)
    np.testing.assert_allclose(diagnostics.loss.numpy(), [math.log(2)] * 2, rtol=1e-6)
    assert diagnostics.clipped.tolist() == [1, 0]


CHUNK = SHAPES["cpu"].rows(100)  # with a hundred classes chunks are short, which keeps the loops quick


@pytest.mark.parametrize("rows", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 3])
def test_shards_around_the_chunk_length(rows):
    x, y, theta = random_case(rows, 3, 100, 2, scale=0.3)
    assert_matches_loops(x, y, theta, [1.0, 3.0], 100)


@pytest.mark.parametrize("lanes", [1, 16])
@pytest.mark.parametrize("classes", [255, 256, 4000])
def test_losses_of_many_classes_and_many_rows(lanes, classes):
    """A model that knows nothing: every row's softmax sums up to the number of classes, and a tile's sums multiplied to
    more than a double holds."""
    x, y, theta = random_case(kernels.TILE + 40, 2, classes, lanes, scale=0.0)
    head, shard = SoftmaxHead(2, classes), Shard.build([(x, y)])
    _, seen = head.clipped_gradient_sum(shard, torch.from_numpy(theta), torch.ones(lanes), diagnose=True)
    loss, _ = head.evaluate(shard, torch.from_numpy(theta))
    assert seen.loss[0].tolist() == pytest.approx([len(y) * math.log(classes)] * lanes, rel=1e-5)
    assert loss.tolist() == pytest.approx([math.log(classes)] * lanes, rel=1e-5)


def test_many_classes():
    x, y, theta = random_case(20, 3, 1000, 2)
    assert_matches_loops(x, y, theta, [0.5, 5.0], 1000)


@given(
    logits=st.floats(0, 60),
    size=st.sampled_from([1.0, 30.0, 1e3]),
    clip=st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 10.0]),
    label=st.integers(0, 2),
)
@example(logits=9.0, size=30.0, clip=1e-3, label=0)
@example(logits=9.0, size=1e3, clip=0.1, label=0)
def test_no_record_moves_the_sum_by_more_than_the_clip(logits, size, clip, label):
    """What privacy rests on: one row's contribution never exceeds the clip, however sure the model is of its label and
    however long the row. With x = (size, 1) and the weights below, class 0 leads by `logits`."""
    x = np.array([[size]], dtype=np.float32)
    W = np.zeros((2, 3), dtype=np.float32)
    W[0] = [logits / size, 0, -0.1 / size]
    fast, _ = clipped_sum(x, np.array([label]), W.reshape(1, 6), [clip], 3)
    assert np.linalg.norm(fast.double().numpy()) <= clip * (1 + 1e-5)


def test_gradients_stay_finite_when_the_model_is_sure():
    x, y, theta = random_case(64, 5, 4, 3, scale=1e3)
    fast, diagnostics = clipped_sum(x, y, theta, [1.0, 10.0, 1e6], 4, diagnose=True)
    assert torch.isfinite(fast).all()
    assert torch.isfinite(diagnostics.loss).all()
    assert_matches_loops(x, y, theta, [1.0, 10.0, 1e6], 4)


# ---- the compiled kernel


def small_case():
    """One client, three rows, two features and the constant, two classes, four lanes."""
    x, y, theta = random_case(3, 2, 2, 4)
    return {"shard": Shard.build([(x, y)]), "theta": torch.from_numpy(theta), "clip": torch.full((4,), 1e-3)}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("clip", lambda case: case | {"clip": case["clip"].double()}),
        ("clip", lambda case: case | {"clip": case["clip"][:3]}),
        ("y", lambda case: case | {"shard": replace(case["shard"], y=case["shard"].y.int())}),
        ("norm", lambda case: case | {"shard": replace(case["shard"], norm=case["shard"].norm.double())}),
        ("norm", lambda case: case | {"shard": replace(case["shard"], norm=case["shard"].norm[:, :2])}),
        ("x", lambda case: case | {"shard": replace(case["shard"], x=case["shard"].x[:, :, :2])}),
    ],
)
def test_c_is_given_what_it_expects_or_nothing(name, wrong, monkeypatch):
    """In torch a bound of another type is a bound; to C it would be none."""
    monkeypatch.setitem(kernels._chosen, "cpu", "compiled")
    SoftmaxHead(2, 2).clipped_gradient_sum(**small_case())
    with pytest.raises(TypeError, match=f"^{name} is "):
        SoftmaxHead(2, 2).clipped_gradient_sum(**wrong(small_case()))


def test_a_label_that_is_no_class_is_refused_before_c_sees_it(monkeypatch):
    monkeypatch.setitem(kernels._chosen, "cpu", "compiled")
    case = small_case()
    case["shard"].y[0, 1] = 2
    with pytest.raises(ValueError, match="label 2"):
        SoftmaxHead(2, 2).clipped_gradient_sum(**case)
    with pytest.raises(ValueError, match="label 2"):
        SoftmaxHead(2, 2).evaluate(case["shard"], case["theta"])


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0xFFC00000 - 2**32, 0x7FFFFFFF])
@pytest.mark.parametrize("lanes", [2, 16])
def test_nan_stays_nan_whatever_its_bits(bits, lanes):
    x, y, theta = random_case(3, 2, 4, lanes)
    weights = torch.from_numpy(theta)
    weights.view(torch.int32)[1, 6] = bits
    head, shard = SoftmaxHead(2, 4), Shard.build([(x, y)])
    gradient, _ = head.clipped_gradient_sum(shard, weights, torch.ones(lanes))
    loss, correct = head.evaluate(shard, weights)
    assert gradient[0, 1].isnan().all()
    assert loss[1].isnan()
    assert not correct[1].any()
    assert gradient[0, 0].isfinite().all()
    assert loss[0].isfinite()


MANY_TILES = kernels.GROUP * kernels.TILE + kernels.TILE + 9
SHAPES_OF_ROWS = [(rows, 7) for rows in (1, 15, 16, kernels.TILE, kernels.TILE + 17)] + [
    (rows, 300) for rows in (1, kernels.TILE + 17, kernels.GROUP * kernels.TILE, MANY_TILES)
]


@pytest.mark.parametrize(("rows", "features"), SHAPES_OF_ROWS)
def test_wide_and_narrow_layouts_give_the_same_bits(rows, features, monkeypatch):
    """LANES + MAX_NARROW lanes: the last ones go one by one, and in a longer pack they do not."""
    lanes = kernels.LANES + compiled.MAX_NARROW
    x, y, theta = random_case(rows, features, 11, lanes, scale=0.5)
    head, shard = SoftmaxHead(features, 11), Shard.build([(x, y)])
    more = np.concatenate([theta, theta[:1]])
    monkeypatch.setitem(kernels._chosen, "cpu", "compiled")
    assert [part.wide for part in compiled.layouts(lanes, 11)] == [True, False]
    assert [part.wide for part in compiled.layouts(lanes + 1, 11)] == [True]

    def results(weights):
        weights = torch.from_numpy(weights)
        gradient, seen = head.clipped_gradient_sum(shard, weights, torch.full((len(weights),), 0.7), diagnose=True)
        return gradient[0], seen.loss[0], seen.clipped[0], *head.evaluate(shard, weights)

    for few, many in zip(results(theta), results(more), strict=True):
        assert torch.equal(few, many[:lanes])


@pytest.mark.parametrize("lanes", [1, kernels.LANES])
@pytest.mark.parametrize("classes", [3, 40])
@pytest.mark.parametrize("features", [7, 255, 256, 300, 520])
def test_the_sum_of_many_tiles_is_that_of_single_tiles(features, classes, lanes, monkeypatch):
    """To the last bit, with any number of features: tiles are added in order, in double precision."""
    monkeypatch.setitem(kernels._chosen, "cpu", "compiled")
    x, y, theta = random_case(MANY_TILES, features, classes, lanes, scale=0.1)
    head, weights, clip = SoftmaxHead(features, classes), torch.from_numpy(theta), torch.full((lanes,), 0.7)

    def gradient(rows):
        return head.clipped_gradient_sum(Shard.build([(x[rows], y[rows])]), weights, clip)[0]

    whole, parts = gradient(slice(None)), torch.zeros(1, *theta.shape, dtype=torch.float64)
    for start in range(0, MANY_TILES, kernels.TILE):
        parts += gradient(slice(start, start + kernels.TILE))
    assert whole.dtype == torch.float64
    assert torch.equal(whole, parts)


def test_the_power_of_two_is_as_accurate_as_it_says(monkeypatch):
    """One row whose logits to base 2 are 0 and z: the residual of class 1 is 2^z / (1 + 2^z), so an error of one unit
    in the last place of the power is one of 2^-23 in it. Every coefficient of the polynomial counts."""
    monkeypatch.setitem(kernels._chosen, "cpu", "compiled")
    z = np.linspace(-59.9, 0, 4096, dtype=np.float32)
    theta = torch.zeros(len(z), 4)
    theta[:, 3] = torch.from_numpy(z) / softmax.LOG2E
    row = Shard.build([(np.zeros((1, 1), dtype=np.float32), np.array([0]))])
    gradient, _ = SoftmaxHead(1, 2).clipped_gradient_sum(row, theta, torch.full((len(z),), 1e6))
    given = (theta[:, 3] * softmax.LOG2E).double().numpy()
    expected = 2.0**given / (1 + 2.0**given)
    error = np.abs(gradient[0, :, 3].numpy() / expected - 1)
    assert error.max() < 4 * 2.0**-23


@pytest.mark.parametrize("lanes", [1, 16])
def test_what_is_sure_leaves_nothing_subnormal(lanes):
    """Logits far apart: residuals are zero or have all their digits, and zeros are not slow."""
    x, y, theta = random_case(200, 5, 4, lanes, scale=40.0)
    head, shard = SoftmaxHead(5, 4), Shard.build([(x, y)])
    gradient, _ = head.clipped_gradient_sum(shard, torch.from_numpy(theta), torch.full((lanes,), 1e-3))
    found = gradient.abs()
    assert ((found == 0) | (found > torch.finfo(torch.float32).tiny)).all()


# ---- lanes


@pytest.mark.parametrize(("rows", "features", "classes"), [(1500, 64, 10), (700, 123, 2), (300, 20, 37)])
def test_a_lane_knows_nothing_of_the_others(rows, features, classes):
    """Alone, among 40, in another order, with lanes of nan: the same bits, in the gradient and in the evaluation."""
    x, y, theta = random_case(rows, features, classes, 40, scale=0.2)
    clip = np.random.default_rng(3).uniform(1, 10, 40).astype(np.float32)
    head, shard = SoftmaxHead(features, classes), Shard.build([(x, y)])

    def bits(lanes, weights=theta):
        chosen = torch.from_numpy(weights[lanes])
        gradient, found = head.clipped_gradient_sum(shard, chosen, torch.from_numpy(clip[lanes]), diagnose=True)
        loss, correct = head.evaluate(shard, chosen)
        parts = (gradient[0], found.loss[0], found.clipped[0], loss, correct)
        return {lane: [part[i].numpy().tobytes() for part in parts] for i, lane in enumerate(lanes)}

    whole = bits(list(range(40)))
    assert bits(list(reversed(range(40)))) == whole
    for lane in range(0, 40, 3):
        assert bits([lane]) == {lane: whole[lane]}
    broken = theta.copy()
    broken[5] = np.nan
    broken[6] = np.inf
    beside = bits(list(range(40)), broken)
    assert all(beside[lane] == whole[lane] for lane in range(40) if lane not in (5, 6))


def test_clients_side_by_side():
    """As a GPU computes them: clients of 1 to 300 rows, filled up to the longest, each with its own weights or all with
    the same. The filling adds nothing, to no number."""
    sizes = (300, 1, 77, 130)
    cases = [random_case(rows, 6, 5, 3, seed, scale=0.5) for seed, rows in enumerate(sizes)]
    clip = torch.tensor([0.5, 2.0, 1e6])
    head, together = SoftmaxHead(6, 5), Shard.build([(x, y) for x, y, _ in cases])
    assert together.size.flatten().tolist() == list(sizes)
    own = torch.from_numpy(np.stack([theta for _, _, theta in cases]))
    for weights in (own, own[0]):
        gradient, found = head.clipped_gradient_sum(together, weights, clip, diagnose=True)
        for client, (x, y, _) in enumerate(cases):
            theta = weights[client] if weights.dim() == 3 else weights
            alone, expected = head.clipped_gradient_sum(Shard.build([(x, y)]), theta, clip, diagnose=True)
            np.testing.assert_allclose(gradient[client], alone[0], rtol=1e-5, atol=1e-4)
            np.testing.assert_allclose(found.loss[client], expected.loss[0], rtol=1e-5)
            assert torch.equal(found.clipped[client], expected.clipped[0])


def test_diagnostics_do_not_change_the_gradient():
    x, y, theta = random_case(300, 20, 5, 3)
    with_them, _ = clipped_sum(x, y, theta, [1.0, 2.0, 3.0], 5, diagnose=True)
    without, nothing = clipped_sum(x, y, theta, [1.0, 2.0, 3.0], 5, diagnose=False)
    assert nothing is None
    assert torch.equal(with_them, without)


@given(
    clients=st.integers(1, 3),
    lanes=st.integers(1, 40),
    rows=st.integers(1, 5),
    classes=st.integers(2, 4),
    width=st.sampled_from([1, 16, 64]),
)
def test_blocks_come_back_as_they_went(clients, lanes, rows, classes, width):
    theta = torch.arange(clients * lanes * rows * classes, dtype=torch.float32).view(clients, lanes, -1)
    blocks = to_blocks(theta, rows, classes, width)
    assert torch.equal(from_blocks(blocks, classes, width, lanes), theta)


def test_inputs_are_left_alone():
    x, y, theta = random_case(30, 4, 3, 2)
    shard, weights, clip = Shard.build([(x, y)]), torch.from_numpy(theta.copy()), torch.tensor([1.0, 2.0])
    before = [part.clone() for part in (shard.x, shard.norm, shard.y, weights, clip)]
    SoftmaxHead(4, 3).clipped_gradient_sum(shard, weights, clip, diagnose=True)
    SoftmaxHead(4, 3).evaluate(shard, weights)
    after = (shard.x, shard.norm, shard.y, weights, clip)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ---- evaluation


@pytest.mark.parametrize("rows", [1, 7, 200, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_evaluate_against_numpy(rows, classes):
    x, y, theta = random_case(rows, 6, classes, 18)
    loss, correct = SoftmaxHead(6, classes).evaluate(Shard.build([(x, y)]), torch.from_numpy(theta))
    constant = np.hstack([x, np.ones((rows, 1))])
    for lane in range(18):
        scores = constant @ theta[lane].astype(np.float64).reshape(7, classes)
        assert (correct[lane].numpy() == (scores.argmax(axis=1) == y)).all()
        lifted = scores - scores.max(axis=1, keepdims=True)
        expected = np.mean(np.log(np.exp(lifted).sum(axis=1)) - lifted[np.arange(rows), y])
        assert loss[lane].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_ties_count_as_wrong():
    """Weights of zero score all classes alike: nothing is correct. Neither is it where two classes share the lead."""
    x, y, _ = random_case(40, 3, 4, 1)
    two_lead = np.zeros((4, 4), dtype=np.float32)
    two_lead[3] = [1, 1, 0, 0]
    theta = torch.from_numpy(np.stack([np.zeros(16, dtype=np.float32), two_lead.ravel()]))
    loss, correct = SoftmaxHead(3, 4).evaluate(Shard.build([(x, y)]), theta)
    assert not correct.any()
    assert loss[0].item() == pytest.approx(math.log(4))


def test_nan_weights_are_never_correct():
    x, y, _ = random_case(40, 3, 4, 1)
    loss, correct = SoftmaxHead(3, 4).evaluate(Shard.build([(x, y)]), torch.full((1, 16), math.nan))
    assert not correct.any()
    assert not torch.isfinite(loss).any()


# ---- exact sums


def wide_numbers(rng, count):
    """Rows of eight numbers of very different sizes."""
    sizes = 10.0 ** rng.uniform(-9, 4, (count, 8))
    return (sizes * rng.choice([-1, 1], (count, 8))).astype(np.float32)


@given(st.integers(0, 10**6), st.integers(2, 50))
def test_grid_sums_do_not_depend_on_order(seed, count):
    """In any order and any grouping, as hosts may make them."""
    rng = np.random.default_rng(seed)
    parts = [to_grid(torch.from_numpy(row)) for row in wide_numbers(rng, count)]
    forward = sum(parts)
    cut = int(rng.integers(1, count))
    shuffled = [parts[i] for i in rng.permutation(count)]
    assert torch.equal(forward, sum(shuffled))
    assert torch.equal(forward, sum(shuffled[:cut]) + sum(shuffled[cut:]))


def test_plain_sums_would_depend_on_order():
    """Guards the test above: without the grid, the same sums do differ, in float64, too."""
    rows = wide_numbers(np.random.default_rng(0), 50).astype(np.float64)
    assert (rows.cumsum(axis=0)[-1] != rows[::-1].cumsum(axis=0)[-1]).any()


def test_the_grid_is_finer_than_float32_needs():
    values = torch.tensor([0.0, 1.0, -1.0, 1e-3, 123.456, 1e4])
    assert from_grid(to_grid(values)).tolist() == pytest.approx(values.tolist(), abs=0.5 / GRID)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_to_grid_leaves_its_argument_alone(dtype):
    values = torch.ones(3, dtype=dtype)
    to_grid(values)
    assert values.tolist() == [1, 1, 1]


def test_nan_and_infinity_survive_the_grid():
    out = from_grid(to_grid(torch.tensor([math.nan, math.inf, -math.inf])))
    assert math.isnan(out[0])
    assert out[1:].tolist() == [math.inf, -math.inf]


def test_very_large_losses_add_up_exactly():
    """Lanes that are far off have losses beyond the range of the grid's whole numbers. In single precision such numbers
    are multiples of a coarser step, so that their sums are exact all the same."""
    x, y, theta = random_case(40, 3, 4, 6, scale=1e7)
    _, seen = clipped_sum(x, y, theta, [1.0] * 6, 4, diagnose=True)
    assert seen.loss.dtype == torch.float32
    assert seen.loss.max() > 2**53 / GRID
    parts = [to_grid(loss / 7) for loss in seen.loss]
    assert sum(parts[:2], start=sum(parts[2:])) == sum(parts)
