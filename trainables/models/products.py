"""Batched matrix products in float32, tf32 or bf16; the result is float32.

A GPU multiplies bf16 natively and rounds to tf32 itself. A CPU has neither: the factors are rounded and multiplied in
float32, where the product of two such numbers is exact. So a CPU reproduces a GPU's results, up to the order of sums
and the GPU's rounding to tf32, but is not faster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from trainables.choices import Precision
from trainables.lazy import torch

TF32_BITS = 13  # mantissa bits of float32 that tf32 lacks


@dataclass(frozen=True)
class Products:
    precision: Precision = "float32"

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """A factor rounded for `of`. Round once if a factor is used several times."""
        if self.precision == "bf16":
            return values.bfloat16() if values.is_cuda else values.bfloat16().to(values.dtype)
        return _to_tf32(values) if self.precision == "tf32" and not values.is_cuda else values

    def of(self, one: torch.Tensor, other: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        """The product of two rounded factors. `room`: memory that may be used for the result."""
        if self.precision == "bf16" and one.is_cuda:
            return torch.bmm(one, other, out_dtype=torch.float32)
        with _tf32() if self.precision == "tf32" and one.is_cuda else contextlib.nullcontext():
            return torch.bmm(one, other, out=room)


def _to_tf32(values: torch.Tensor) -> torch.Tensor:
    """Round to 10 mantissa bits; ties away from zero."""
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
