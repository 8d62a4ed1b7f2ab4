"""Norms and weighted sums of per-example gradients with respect to one array of parameters.

For large layers the gradients themselves are not stored:

    Expanded    the gradients themselves, for arrays as small as a norm layer's scale
    Product     e^T a, with a the input of a linear layer and e the derivative of its output, at T positions

The squared norm of e^T a is computed as the sum over pairs of positions of <a_s, a_t> <e_s, e_t> (Li et al. 2022), or
from the product itself, whichever takes fewer operations (Bu et al. 2022).

Norms and sums are computed in float64 from the same numbers, which the forward and the backward pass may have computed
in any precision. So the length of a clipped contribution exceeds the clip by a relative error of at most 2^-52 times
the number of terms. Only the sum over pairs may cancel: its rounding error is at most 2^-52 times the number of terms
times the square of the sum of |a_t| |e_t|. This bound is added to the sum. `MARGIN`, by which the clip is reduced,
covers all other rounding for up to 2^30 terms.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trainables.lazy import torch

ROUNDING = 2.0**-52
MARGIN = 2.0**-20


class Gradients(Protocol):
    """The gradients of n rows."""

    def squared_norms(self) -> torch.Tensor:
        """(n,), float64; never below the true value by more than rounding."""

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """The sum of the gradients, each times its factor, flat; a gradient with factor 0 counts as 0."""


@dataclass(frozen=True)
class Expanded:
    values: torch.Tensor
    """(n, size)"""

    def squared_norms(self) -> torch.Tensor:
        return self.values.double().square().sum(1)

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        return factors @ _without_dropped(self.values, factors)


@dataclass(frozen=True)
class Product:
    inputs: torch.Tensor
    """a: (n, T, inputs)"""
    errors: torch.Tensor
    """e: (n, T, outputs)"""

    def squared_norms(self) -> torch.Tensor:
        a, e = self.inputs.double(), self.errors.double()
        positions, per_pair, entries = a.shape[1], a.shape[2] + e.shape[2], a.shape[2] * e.shape[2]
        if positions * per_pair > entries:
            return (e.mT @ a).square().sum((1, 2))
        of_inputs, of_errors = a @ a.mT, e @ e.mT
        lengths = (of_inputs.diagonal(dim1=1, dim2=2) * of_errors.diagonal(dim1=1, dim2=2)).clamp(min=0).sqrt().sum(1)
        rounding = (per_pair + positions**2) * ROUNDING * lengths.square() if positions > 1 else 0.0
        return (of_inputs * of_errors).sum((1, 2)) + rounding

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        a, e = (_without_dropped(part.flatten(1), factors).view(part.shape) for part in (self.inputs, self.errors))
        return ((e * factors.view(-1, 1, 1)).flatten(0, 1).mT @ a.flatten(0, 1)).flatten()


def joined(parts: Sequence[Gradients]) -> list[Gradients]:
    """The same gradients, with neighbouring `Expanded` parts concatenated, which needs fewer operations."""
    found: list[Gradients] = []
    for expanded, group in itertools.groupby(parts, key=lambda part: isinstance(part, Expanded)):
        members = list(group)
        found += [Expanded(torch.cat([part.values for part in members], 1))] if expanded else members  # type: ignore[attr-defined]
    return found


def _without_dropped(values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The values in float64, with zeros in rows with factor 0, which may hold nan or infinity."""
    return values.double().masked_fill((factors == 0).unsqueeze(1), 0)
