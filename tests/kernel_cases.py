"""Random inputs for the kernels, and the same sums by plain loops."""

import numpy as np
import twin


def random_case(rows, features, classes, lanes, seed=0, scale=1.0):
    """Features, labels and weights (lane, weight), all float32."""
    rng = np.random.default_rng(seed)
    x = (4 * rng.random((rows, features))).astype(np.float32)
    y = rng.integers(0, classes, rows)
    theta = (scale * rng.standard_normal((lanes, (features + 1) * classes))).astype(np.float32)
    return x, y, theta


def by_loops(x, y, W, clip):
    """The sum of clipped gradients, the sum of losses and the number of clipped rows, example by example."""
    total, losses, too_long = np.zeros_like(W), 0.0, 0
    for row, label in zip(x, y, strict=True):
        row = twin.with_constant(row)
        g = twin.gradient(W, row, label)
        total += twin.clipped(g, clip)
        losses += twin.loss(W, row, label)
        too_long += bool(np.linalg.norm(g) > clip)
    return total, losses, too_long
