"""Batched matrix products in the precision that was asked for; what comes out is in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trainables.spec import Precision


@dataclass(frozen=True)
class Products:
    precision: Precision = "float32"

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """As the products want their factors: to be done once where a factor is used again."""
        return values.bfloat16() if self.precision == "bf16" else values

    def of(self, one: torch.Tensor, other: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        """`room`: where there is some for what comes out; it may lie elsewhere."""
        if self.precision == "bf16":
            return torch.bmm(one, other, out_dtype=torch.float32)
        with _tf32() if self.precision == "tf32" else contextlib.nullcontext():
            return torch.bmm(one, other, out=room)


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
