"""Centred features x - m, with a public centre m. A model of x - m is a model of x with another constant term."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def centred(x: NDArray[np.float32], centre: NDArray[np.float32] | None) -> NDArray[np.float32]:
    return x if centre is None else x.astype(np.float32) - centre


def for_raw_features(theta: torch.Tensor, centre: NDArray[np.float32] | None, first_layer: int) -> torch.Tensor:
    """Weights (lanes, d) for centred features converted to weights for raw features: the constant (the last row) of the
    first layer changes by -m^T W."""
    if centre is None:
        return theta
    moved = theta.clone()
    layer = moved[:, :first_layer].unflatten(1, (len(centre) + 1, -1))
    layer[:, -1] -= torch.einsum("f,lfk->lk", torch.from_numpy(centre).to(theta), layer[:, :-1])
    return moved
