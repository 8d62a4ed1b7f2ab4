"""Batched matrix products in the precision that was asked for; what comes out is in float32.

A GPU multiplies bf16 as it is, and rounds to tf32 by itself. A CPU has neither: there factors are rounded to what they
would be, and multiplied in float32, which is exact for a product of two such numbers. So a CPU shows what a GPU would
come to, up to the order of a sum and how the GPU rounds to tf32, without being faster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from trainables.choices import Precision
from trainables.lazy import torch

TF32_BITS = 13  # of a float32's 23 that tf32 lacks


@dataclass(frozen=True)
class Products:
    precision: Precision = "float32"

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """As the products want their factors: to be done once where a factor is used again."""
        if self.precision == "bf16":
            return values.bfloat16() if values.is_cuda else values.bfloat16().to(values.dtype)
        return _to_tf32(values) if self.precision == "tf32" and not values.is_cuda else values

    def of(self, one: torch.Tensor, other: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        """Of factors that are rounded. `room`: where there is some for what comes out; it may lie elsewhere."""
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
