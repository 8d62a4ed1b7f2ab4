"""The centres of the lanes: public vectors m, one per lane, that are subtracted from the features x.

Lanes with different centres share the raw rows, in one of two ways:

- A kernel subtracts the centre from rows that it has loaded. It computes lanes in groups with the same centre.
- A model of x - m is a model of x with another constant, so lanes are computed together whatever their centres:

      predictors  (x - m)^T W + b = x^T W + (b - m^T W)
      gradient    sum (x - m) r^T = sum x r^T - m (sum r)^T, and sum r is the gradient of the constant b

  The conversion is elementwise and in float64, so a lane's bits do not depend on the other lanes. In sum x r^T a
  clipped row counts up to 1 + ||m|| times as much as in the result, since ||r|| <= C / ||x - m|| <= C: the constant 1
  makes ||x - m|| at least 1. The rounding error of this sum grows by the same factor and must stay far below the clip
  C. So only short centres move into the constant, and few rows are added in float32. The predictors' own rounding is
  harmless: the clip bounds every row for any residual r.

In both cases ||x - m|| is computed from the differences, once per row and distinct centre.

Features may also be scaled: they become f (x - m), with a power of two f per lane. Lanes that share rows
then use the weights f W with unscaled features, and their gradient is multiplied by f. Neither product is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainables.lazy import torch

LONGEST = 32.0  # longest centre that may move into the constant; in sums of FLOAT32_ROWS rows, rounding is below 1e-4 C
FLOAT32_ROWS = 128  # rows that are added in float32 in torch, as in a tile of the C kernel

Sharing = Literal["kernel", "constant", "no"]
"""How lanes with different centres share rows. `kernel`: the kernel subtracts the centres. `constant`: the centres move
into the constant. `no`: the lanes of each centre are computed separately."""


class Groups(NamedTuple):
    """Lanes in groups of a fixed size with the same centre. The last group of a centre is padded with copies of the
    centre's first lane."""

    means: torch.Tensor
    """(centres, features)"""
    lane: torch.Tensor
    """(positions,): the lane at every position, where a group is `size` consecutive positions."""
    position: torch.Tensor
    """(lanes,): a position of every lane."""
    centre: torch.Tensor
    """(groups,): the index of every group's centre."""


@dataclass(frozen=True, eq=False)
class Centres:
    means: torch.Tensor
    """(centres, features). All different; with `factors`, the pairs of mean and factor are."""
    of_lane: torch.Tensor
    """(lanes,): the index of every lane's centre."""
    factors: torch.Tensor | None = None
    """(centres,): powers of two that multiply x - m; None: all are 1."""

    @classmethod
    def of(cls, centre: NDArray[np.float32], device: str, factor: NDArray[np.float32] | None = None) -> Centres:
        """`centre`: (lanes, features). `factor`: (lanes,)."""
        table = centre if factor is None else np.concatenate([centre, factor[:, None]], axis=1)
        distinct, of_lane = np.unique(table, axis=0, return_inverse=True)
        means = np.ascontiguousarray(distinct[:, : centre.shape[1]])
        factors = None if factor is None else torch.from_numpy(distinct[:, -1].copy()).to(device)
        return cls(torch.from_numpy(means).to(device), torch.from_numpy(of_lane.reshape(-1)).to(device), factors)

    def select(self, lanes: slice | torch.Tensor) -> Centres:
        return Centres(self.means, self.of_lane[lanes], self.factors)

    @cached_property
    def lanes(self) -> dict[int, torch.Tensor]:
        """The lanes of every centre that has any."""
        of_lane = self.of_lane.cpu().numpy()
        by_centre = {centre: np.flatnonzero(of_lane == centre) for centre in np.unique(of_lane).tolist()}
        return {centre: torch.from_numpy(lanes).to(self.of_lane.device) for centre, lanes in by_centre.items()}

    @cached_property
    def far(self) -> set[int]:
        """The centres that are longer than `LONGEST` after scaling."""
        lengths = np.linalg.norm(self.means.cpu().numpy().astype(np.float64), axis=1)
        if self.factors is not None:
            lengths *= self.factors.cpu().numpy()
        return set(np.flatnonzero(~(lengths <= LONGEST)).tolist())

    def in_groups(self, size: int) -> Groups:
        """The lanes in groups of `size`; computed once."""
        if size not in self._groups:
            padded, centre = [], []
            for number, lanes in self.lanes.items():
                groups = -(-len(lanes) // size)
                padded.append(torch.cat([lanes, lanes[:1].expand(groups * size - len(lanes))]))
                centre += [number] * groups
            lane = torch.cat(padded)
            position = torch.empty_like(self.of_lane)
            position[lane.flip(0)] = torch.arange(len(lane), device=lane.device).flip(0)
            of_group = torch.tensor(centre, device=lane.device)
            self._groups[size] = Groups(self.means, lane, position, of_group)
        return self._groups[size]

    @cached_property
    def _groups(self) -> dict[int, Groups]:
        return {}

    def for_raw_features(self, theta: torch.Tensor, first_layer: int) -> torch.Tensor:
        """Weights (..., lanes, d) for centred features converted to weights for raw features. `first_layer`: the
        number of weights of the first layer, whose last row is the constant."""
        moved = self.scaled_weights(theta, first_layer).clone()
        layer = self._as_matrix(moved, first_layer)
        terms = layer[..., :-1, :].double() * self._of_lanes
        while (rows := terms.shape[-2]) > 1:  # by halves: the rounding of `sum` may depend on the number of lanes
            half = rows // 2
            pairs = terms[..., :half, :] + terms[..., half : 2 * half, :]
            terms = torch.cat([pairs, terms[..., 2 * half :, :]], dim=-2) if rows % 2 else pairs
        layer[..., -1, :] = (layer[..., -1, :].double() - terms[..., 0, :]).to(theta)
        return moved

    def centre_gradient_(self, gradient: torch.Tensor, first_layer: int) -> None:
        """Convert sums (..., lanes, d) of gradients for raw features, float64, into sums for centred ones."""
        layer = self._as_matrix(gradient, first_layer)
        layer[..., :-1, :] -= self._of_lanes * layer[..., -1:, :]
        self.scale_gradient_(gradient, first_layer)

    def scaled_weights(self, theta: torch.Tensor, first_layer: int) -> torch.Tensor:
        """Weights (..., lanes, d) for scaled features converted to weights for unscaled ones: without rounding."""
        if self.factors is None:
            return theta
        scaled = theta.clone()
        self._as_matrix(scaled, first_layer)[..., :-1, :] *= self._factors_of_lanes.to(theta)
        return scaled

    def scale_gradient_(self, gradient: torch.Tensor, first_layer: int) -> None:
        """Convert sums of gradients for unscaled features into sums for scaled ones: without rounding."""
        if self.factors is not None:
            self._as_matrix(gradient, first_layer)[..., :-1, :] *= self._factors_of_lanes.to(gradient)

    def _as_matrix(self, values: torch.Tensor, first_layer: int) -> torch.Tensor:
        return values[..., :first_layer].unflatten(-1, (self.means.shape[1] + 1, -1))

    @cached_property
    def _factors_of_lanes(self) -> torch.Tensor:
        """(lanes, 1, 1)"""
        assert self.factors is not None
        return self.factors[self.of_lane].view(-1, 1, 1)

    @cached_property
    def _of_lanes(self) -> torch.Tensor:
        """(lanes, features, 1)"""
        return self.means.double()[self.of_lane].unsqueeze(-1)


F = TypeVar("F", bound=Callable[..., Any])


def for_any_centres(function: F) -> F:
    """Marks a `Model.clipped_gradient_sum` that computes lanes with different centres in one call. The model's
    `sharing` says how. Every lane uses the column of `Shard.norm` for its centre."""
    function.for_any_centres = True  # type: ignore[attr-defined]
    return function


def sharing_of(model: Any, shard: Any, theta: torch.Tensor) -> Sharing:
    """How lanes with different centres share rows; `no` for a plug-in's model, or for a subclass that overrides the
    marked function."""
    marked = getattr(type(model).clipped_gradient_sum, "for_any_centres", False)
    return model.sharing(shard, theta) if marked else "no"
