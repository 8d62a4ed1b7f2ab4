"""Batched matrix products in the precision that was asked for; what comes out is in float32.

A GPU multiplies bf16 as it is, and rounds to tf32 by itself. Float32 it multiplies slowly; split into a part that tf32
holds and a rest, factors take three products of tf32, whose sum is as accurate. A CPU has neither: there factors are
rounded to what they would be, and multiplied in float32, which is exact for a product of two such numbers. So a CPU
shows what a GPU would come to, up to the order of a sum and how the GPU rounds to tf32, without being faster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trainables.later import torch
from trainables.spec import Precision

TF32_BITS = 13  # of a float32's 23 that tf32 lacks


class Split(NamedTuple):
    """A factor as the sum of what tf32 holds of it and of the rest."""

    most: torch.Tensor
    rest: torch.Tensor

    @property
    def mT(self) -> Split:  # noqa: N802 (as torch calls it)
        return Split(self.most.mT, self.rest.mT)

    def expand(self, *sizes: int) -> Split:
        return Split(self.most.expand(*sizes), self.rest.expand(*sizes))


@dataclass(frozen=True)
class Products:
    precision: Precision = "float32"
    split: bool = False
    """Whether float32 is made of tf32, on a GPU."""

    def factor(self, values: torch.Tensor) -> torch.Tensor | Split:
        """As the products want their factors: to be made once where a factor is used again."""
        if self.precision == "float32" and self.split:
            most = _to_tf32(values)
            return Split(most, values - most)
        return self.rounded(values)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """What is left of a factor."""
        if self.precision == "bf16":
            return values.bfloat16() if values.is_cuda else values.bfloat16().to(values.dtype)
        return _to_tf32(values) if self.precision == "tf32" and not values.is_cuda else values

    def of(
        self, one: torch.Tensor | Split, other: torch.Tensor | Split, room: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`room`: where there is some for what comes out; it may lie elsewhere."""
        if isinstance(one, Split) and isinstance(other, Split):
            with _tf32():
                total = torch.bmm(one.most, other.rest, out=room)
                total.baddbmm_(one.rest, other.most)
                return total.baddbmm_(one.most, other.most)
        assert isinstance(one, torch.Tensor)
        assert isinstance(other, torch.Tensor)
        if self.precision == "bf16" and one.is_cuda:
            return torch.bmm(one, other, out_dtype=torch.float32)
        with _tf32() if self.precision == "tf32" and one.is_cuda else contextlib.nullcontext():
            return torch.bmm(one, other, out=room)


def _to_tf32(values: torch.Tensor) -> torch.Tensor:
    """To the nearest number with ten bits behind the point, of two the one further from zero."""
    bits = values.float().view(torch.int32)
    return ((bits + (1 << TF32_BITS - 1)) & -(1 << TF32_BITS)).view(torch.float32)


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
