"""Sums of many rows: one row changes them by its contribution and no more."""

import numpy as np
import pytest
import torch

from trainables import models
from trainables.models.shard import Shard

ROWS, CLIP = 50_000, 1.0


@pytest.mark.parametrize("model", ["softmax", "logistic", "mlp:2"])
def test_one_record_moves_a_long_sum_by_its_bound(model):
    """All rows alike, so that nothing cancels and the sum is as long as can be, 50,000: its last float32 digit is
    0.004. Replacing a row by its opposite moves the sum by 2C; a float32 sum would move by up to 1.0014 of that."""
    head = models.parse(model, features=2, classes=2)
    theta = 0.01 * torch.linspace(-1, 1, head.dimension).unsqueeze(0)
    x, y = np.full((ROWS, 2), 31.7, dtype=np.float32), np.zeros(ROWS, dtype=np.int64)
    x[:, 1] = 17.3
    other_x, other_y = x.copy(), y.copy()
    other_y[4321] = 1
    sums = [
        head.clipped_gradient_sum(Shard.build([part]), theta, torch.tensor([CLIP]))[0][0, 0]
        for part in ((x, y), (other_x, other_y))
    ]
    exact = [
        head.clipped_gradient_sum(
            Shard.build([part], dtype=torch.float64), theta.double(), torch.tensor([CLIP]).double()
        )[0][0, 0]
        for part in ((x[:1], y[:1]), (x[:1], other_y[4321:4322]))
    ]
    moved, should = (sums[0] - sums[1]).norm().item(), (exact[0] - exact[1]).norm().item()
    assert should > CLIP
    assert moved == pytest.approx(should, rel=1e-4)


@pytest.mark.parametrize("length", [9.91, 9.93, 9.95, 9.97])
def test_the_sum_of_squares_too(length):
    """||x x^T|| is nearly 100, and 5,000,000 in sum: a float32 has no digit below 0.5 there."""
    x = np.full((ROWS, 1), length, dtype=np.float32)
    full = Shard.build([(x, np.zeros(ROWS, dtype=np.int64))]).gram(10.1)
    less = Shard.build([(x[1:], np.zeros(ROWS - 1, dtype=np.int64))]).gram(10.1)
    assert (full - less).norm().item() == pytest.approx(length**2 + 1, rel=1e-4)
