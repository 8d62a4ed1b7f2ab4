"""Identifies the kernels of a node: Triton by its version, C kernels by a hash of results, because another compiler or
another cached file may round differently."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata

import numpy as np

from trainables.models import kernels
from trainables.models.kernels import GROUP, LANES, TILE, Kernel

ROWS, FEATURES, CLASSES = 2 * TILE + 9, 21, 5  # more than one tile, and no multiple of a vector


def kernel_build(kernel: Kernel) -> str:
    if kernel == "compiled":
        return f"compiled {_hash_of_sums()}"
    return f"triton {metadata.version('triton')}" if kernel == "triton" else kernel


@cache
def _hash_of_sums() -> str:
    """The hash of clipped gradients and losses of fixed rows, in both layouts."""
    found = hashlib.sha256()
    for wide in (True, False):
        for array in _sums(wide):
            found.update(array.tobytes())
    return found.hexdigest()[:16]


def _sums(wide: bool) -> tuple[np.ndarray, np.ndarray]:
    """The clipped gradient sum and the losses of fixed rows; without torch, which the driver does not import."""
    library = kernels.library()
    assert library is not None, "the C kernels are not compiled"
    width = library.vector_width()
    lanes = LANES if wide else 1
    columns = CLASSES * LANES if wide else -(-CLASSES // width) * width
    draw = np.random.default_rng(7)
    # multiples of 1/128, which are exact in float32: the inputs have the same bits on every machine
    x = (draw.integers(-256, 256, (ROWS, FEATURES)) / 128).astype(np.float32)
    norm = np.sqrt((x * x).sum(1, dtype=np.float64)).astype(np.float32)
    label = draw.integers(0, CLASSES, ROWS)
    weights = np.zeros((FEATURES, columns), np.float32)
    used = columns if wide else CLASSES
    weights[:, :used] = draw.integers(-128, 128, (FEATURES, used)) / 128
    clip, of_lane, sizes = np.full(lanes, 0.75, np.float32), np.zeros(lanes, np.int64), np.array([ROWS])
    total, loss, clipped = np.zeros((FEATURES, columns)), np.empty(lanes), np.empty(lanes)
    scratch = np.empty(GROUP * TILE * columns + CLASSES * LANES, np.float32)
    library.gradient_sums(
        *(array.ctypes.data for array in (x, norm, label, sizes)),
        *(1, 1, ROWS, FEATURES, CLASSES),
        *(weights.ctypes.data, 0, 1, wide),
        *(clip.ctypes.data, of_lane.ctypes.data, 0),
        *(array.ctypes.data for array in (total, loss, clipped, scratch)),
    )
    return total[:, :used], loss
