"""Norms and weighted sums of per-example gradients with respect to one array of parameters.

    Expanded    the gradients themselves: of norm layers, biases, and LoRA factors of a layer that a row reaches at
                several positions, which are small
    Outer       e a^T of a large layer, with one input a and one derivative e of its output per row; it is not stored,
                and its norm is |e| |a|

A layer that a row reaches at several positions has the sum of e_t a_t^T over the positions t as its gradient. This sum
is formed row by row, before the rows are added up: its terms may be far larger than their sum, and a product over the
positions of all rows would round the sums of other rows to the size of these terms.

Norms and sums are computed in float64 from the same numbers, which may have been computed in any precision. So the
length of a clipped contribution exceeds the clip by a relative error of at most 2^-52 times the number of terms.
`MARGIN`, by which the clip is reduced, covers it for up to 2^30 terms.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trainables.lazy import torch

MARGIN = 2.0**-20


class Gradients(Protocol):
    """The gradients of n rows."""

    def squared_norms(self) -> torch.Tensor:
        """(n,), float64."""

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
class Outer:
    errors: torch.Tensor
    """e: (n, outputs)"""
    inputs: torch.Tensor
    """a: (n, inputs)"""

    def squared_norms(self) -> torch.Tensor:
        return self.errors.double().square().sum(1) * self.inputs.double().square().sum(1)

    def weighted_sum(self, factors: torch.Tensor) -> torch.Tensor:
        e, a = (_without_dropped(part, factors) for part in (self.errors, self.inputs))
        return ((e * factors.unsqueeze(1)).T @ a).flatten()


def of_product(errors: torch.Tensor, inputs: torch.Tensor) -> Gradients:
    """The gradient of a matrix with these inputs and derivatives of its outputs: (n, size), or (n, positions, size)."""
    if inputs.dim() == 2:
        return Outer(errors, inputs)
    return Expanded((errors.float().mT @ inputs.float()).flatten(1))


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
