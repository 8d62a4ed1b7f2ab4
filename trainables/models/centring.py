"""Features moved by a public centre, and weights moved back: a model of x - m is a model of x with another constant."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def centred(x: NDArray[np.float32], centre: NDArray[np.float32] | None) -> NDArray[np.float32]:
    return x if centre is None else x.astype(np.float32) - centre


def for_raw_features(theta: torch.Tensor, centre: NDArray[np.float32] | None, first_layer: int) -> torch.Tensor:
    """Weights (lanes, d) of a model of centred features as those of the same model of features as they came: the first
    layer's constant, its last row, takes -m^T W with it."""
    if centre is None:
        return theta
    moved = theta.clone()
    layer = moved[:, :first_layer].unflatten(1, (len(centre) + 1, -1))
    layer[:, -1] -= torch.einsum("f,lfk->lk", torch.from_numpy(centre).to(theta), layer[:, :-1])
    return moved
