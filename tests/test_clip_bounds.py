"""No clipped contribution is longer than its bound: large models, long features, small clips."""

import math

import numpy as np
import pytest
import small
import torch
from every_kernel import on_a_gpu
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.federation.denormals import flush_denormals
from trainables.methods import METHODS
from trainables.methods.base import clip_norm
from trainables.models import kernels, per_example, residuals
from trainables.models.curvature import clipped_hessian_sum
from trainables.models.glm import GLM, Multinomial, Poisson
from trainables.models.shard import Shard
from trainables.models.softmax import SoftmaxHead

LONG = 1e9
"""A feature whose square times a tiny curvature still exceeds any bound."""


def length(values: torch.Tensor) -> float:
    return torch.linalg.vector_norm(values, dtype=torch.float64).item()


# ---- updates of users, and per-example gradients of any model


@pytest.mark.parametrize(("weights", "value"), [(4_000_000, 1.0), (4_000_000, 0.37), (40_000_000, 1.0)])
def test_an_update_of_a_large_model_is_not_longer_than_the_clip(weights, value):
    """A float32 norm of equal numbers is too short by 2e-4 with 4 million weights and by 5e-3 with 40 million."""
    update = torch.full((1, weights), value)
    clipped = clip_norm(update, torch.tensor([[2.0]]))
    assert 2 * (1 - 1e-6) < length(clipped) <= 2


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 3000),
    scale=st.floats(1e-12, 1e12),
    bound=st.floats(2**-20, 2**20, width=32),
    precision=st.sampled_from(["float32", "tf32", "bf16", "float64"]),
)
def test_no_update_is_longer_than_the_clip(seed, size, scale, bound, precision):
    """Whatever precision the update was computed in. Rounding the factor and the products is included."""
    rng = np.random.default_rng(seed)
    drawn = torch.from_numpy(scale * rng.standard_normal((2, size)) ** rng.integers(1, 4))
    update = {"float64": drawn, "bf16": drawn.bfloat16().float()}.get(precision, drawn.float())
    if precision == "tf32":
        update = (update.view(torch.int32) & -(1 << 13)).view(torch.float32)
    clipped = clip_norm(update, torch.tensor([[bound], [bound]]))
    for before, after in zip(update, clipped, strict=True):
        assert length(after) <= bound
        assert torch.equal(before, after) if length(before) < bound * (1 - 1e-6) else length(after) > bound * (1 - 1e-6)


@pytest.mark.parametrize("automatic", [False, True])
def test_a_per_example_gradient_of_a_large_model_is_not_longer_than_the_clip(automatic):
    weights, clip = 4_000_000, torch.tensor([2.0])
    shard = Shard.build([(np.ones((1, 1), dtype=np.float32), np.zeros(1, dtype=np.int64))])

    def loss(theta, x, y):
        return 100 * theta.sum()

    found = per_example.clipped_gradient_sum(loss, shard, torch.zeros(1, weights), clip, automatic=automatic)[0]
    assert 2 * (1 - 1e-5) < length(found) <= 2


@pytest.mark.parametrize("name", ["dp-fednew", "dp-fednew-fc"])
def test_newton_directions_are_not_rounded_before_the_noise(name, monkeypatch):
    """A client's mean has a float32 resolution of 6e-8, and one of its many rows moves it by less than that."""
    of = small.problem(data="synthetic-frozen:60,20,12,4", clients=3)
    solved = []
    update = type(METHODS[name].program(METHODS[name].check({})))
    solve = update.solve

    def seen(self, *given):
        solved.append((given[2].dtype, solve(self, *given).dtype))
        return solve(self, *given)

    monkeypatch.setattr(update, "solve", seen)
    small.weights_after(1, [small.trial(of, name)], of)
    assert set(solved) == {(torch.float64, torch.float64)}


# ---- curvature and gradients whose squares underflow


def long_row(logit: float, features: int = 64, classes: int = 3) -> tuple[Shard, torch.Tensor]:
    """One long row of class 0, and weights that give class 0 this logit and the others 0."""
    x = np.full((1, features), LONG, dtype=np.float32)
    weights = torch.zeros(features + 1, classes)
    weights[-1, 0] = logit
    return Shard.build([(x, np.zeros(1, dtype=np.int64))]), weights


@pytest.mark.parametrize("logit", [30.0, 43.0, 44.0, 45.0, 46.0, 60.0])
def test_a_hessian_whose_squares_underflow_is_clipped(logit):
    """p (1 - p) of about 1e-19 squared is no float32, and the row's squared norm is 6e19."""
    shard, weights = long_row(logit)
    with flush_denormals():
        found = clipped_hessian_sum(shard, weights.flatten(), 1.0)
    exact = clipped_hessian_sum(_double(shard), weights.flatten().double(), 1.0)
    assert length(found) <= 1 + 1e-5
    assert length(found) == pytest.approx(length(exact), rel=1e-4)


@pytest.mark.parametrize("logit", [30.0, 43.0, 44.0, 45.0, 46.0, 60.0])
@pytest.mark.parametrize("model", [Multinomial(64, 3), Multinomial(64, 2), Poisson(64)], ids=["three", "two", "counts"])
def test_a_hessian_of_a_glm_whose_squares_underflow_is_clipped(model: GLM, logit):
    shard, _ = long_row(0.0)
    theta = torch.zeros(model.rows, model.columns)
    theta[-1] = -logit
    bound = torch.ones(1)
    with flush_denormals():
        found = model.clipped_hessian_sum(shard, theta.view(1, -1), bound)
    exact = model.clipped_hessian_sum(_double(shard), theta.view(1, -1).double(), bound.double())
    assert length(found) <= 1 + 1e-5
    assert length(found) == pytest.approx(length(exact), rel=1e-4)


@pytest.mark.parametrize("logit", [30.0, 43.0, 44.0, 46.0, 50.0, 60.0])
@pytest.mark.parametrize("model", [Multinomial(64, 3), Poisson(64)], ids=["three", "counts"])
def test_a_gradient_of_a_glm_whose_squares_underflow_is_clipped(model: GLM, logit):
    """A residual of 1e-20 and a row of length 8e9: the gradient of 8e-11 is eight times as long as the clip."""
    shard, _ = long_row(0.0)
    theta, clip = torch.zeros(model.rows, model.columns), torch.tensor([1e-11])
    theta[-1] = -logit
    with flush_denormals():
        found, _ = model.clipped_gradient_sum(shard, theta.view(1, -1), clip)
    assert length(found) <= 1e-11 * (1 + 1e-5)


def _double(shard: Shard) -> Shard:
    return Shard.build([(shard.x[0, :, :-1].numpy(), shard.y[0].numpy())], dtype=torch.float64)


def gradient_of_long_row(logit: float, device: str, automatic: bool = False, clip: float = 1e-11) -> float:
    shard, weights = long_row(logit)
    placed = Shard.build([(shard.x[0, :, :-1].numpy(), shard.y[0].numpy())], device)
    found, _ = SoftmaxHead(64, 3).clipped_gradient_sum(
        placed, weights.view(1, -1).to(device), torch.tensor([clip], device=device), automatic=automatic
    )
    return length(found) / clip


@pytest.mark.parametrize("logit", [30.0, 41.0, 42.0, 44.0, 60.0, 80.0])
def test_a_gradient_whose_squares_underflow_is_clipped(both_kernels, logit):
    with flush_denormals():
        assert gradient_of_long_row(logit, "cpu") <= 1 + 1e-5


@on_a_gpu
@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("logit", [30.0, 41.0, 42.0, 44.0, 60.0, 80.0])
def test_a_gradient_whose_squares_underflow_is_clipped_on_a_gpu(kernel, logit, automatic, monkeypatch):
    monkeypatch.setitem(kernels._chosen, "cuda", kernel)
    assert gradient_of_long_row(logit, "cuda", automatic) <= 1 + 1e-5


@on_a_gpu
@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("logit", [30.0, 41.0, 42.0, 44.0, 60.0, 80.0])
def test_a_gradient_between_the_products_is_clipped_on_a_gpu(logit, automatic, monkeypatch):
    """The kernel for heads that do not fit the registers."""
    from trainables.models import softmax_triton

    monkeypatch.setitem(kernels._chosen, "cuda", "triton")
    monkeypatch.setattr(softmax_triton, "fits", lambda *_: False)
    assert gradient_of_long_row(logit, "cuda", automatic) <= 1 + 1e-5


@pytest.mark.parametrize("logit", [0.0, 30.0, 41.0, 44.0, 60.0, 80.0])
def test_the_arithmetic_of_the_fused_kernel_keeps_the_clip(logit):
    """`_residuals` of softmax_triton.py step by step, in NumPy's float32 with subnormal numbers flushed to zero."""
    norm, clip = np.float32(8 * LONG), np.float32(1e-11)
    z = np.array([logit / math.log(2), 0, 0], dtype=np.float32)
    shifted = z - z.max()
    power = np.where(shifted < residuals.LEAST, np.float32(0), np.exp2(shifted))
    others = np.where(np.arange(3) == 0, np.float32(0), power)
    lost, whole = others.sum(), power.sum()
    squares = _flushed(others * others)
    size = np.sqrt(_flushed(squares.sum() + lost * lost)) / whole * norm
    with np.errstate(divide="ignore"):
        factor = min(clip / size, np.float32(1))
    residual = np.where(np.arange(3) == 0, -lost, others) * (factor / whole)
    assert np.linalg.norm(residual.astype(np.float64)) * norm <= clip * (1 + 1e-5)


def _flushed(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values)
