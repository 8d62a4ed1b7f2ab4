"""Clipping factors, given a contribution's l2 norm and its bound C.

    plain:      min(1, C / norm)
    automatic:  C / (norm + 0.01)     (Bu, Wang, Zha and Karypis 2023)

Automatic clipping also scales short contributions up, so the clip acts as part of the learning rate. In both cases no
contribution is longer than C: the privacy account is the same.

`clip_factors` is for contributions that are in memory as a whole. It keeps the bound in spite of rounding: the factor
and its products with the d numbers are rounded, each with a relative error of at most u (half of `torch.finfo.eps`),
and the norm is a float64 sum, with a relative error of at most d 2^-53. The bound is reduced by a relative 4 u +
d 2^-52, which is more than all of these.
"""

from __future__ import annotations

from trainables.lazy import torch

SOFTENING = 0.01  # keeps tiny contributions from being scaled up to C
EXPONENT = 120  # `scaled_norm` scales by at least 2^-120 and at most 2^120


def factors_(norm: torch.Tensor, bound: torch.Tensor, automatic: bool = False) -> torch.Tensor:
    """The factors, written over the norms."""
    if automatic:
        return torch.div(bound, norm.add_(SOFTENING), out=norm)
    return torch.div(bound, norm, out=norm).clamp_(max=1)


def clip_factors(values: torch.Tensor, bound: torch.Tensor, automatic: bool = False) -> torch.Tensor:
    """The factors of the vectors along the last dimension, (..., 1); no product is longer than the bound."""
    norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True, dtype=torch.float64)
    margin = 2 * torch.finfo(values.dtype).eps + values.shape[-1] * torch.finfo(norm.dtype).eps
    return factors_(norm, bound.double() * (1 - margin), automatic).to(values.dtype)


def scaled_norm(values: torch.Tensor, dim: int | tuple[int, ...]) -> torch.Tensor:
    """The l2 norm, also where squares would underflow or overflow. Values are first divided by a power of two, which is
    exact, so norms that need no scaling keep their bits."""
    _, exponent = torch.frexp(values.abs().amax(dim, keepdim=True))
    scale = torch.exp2(exponent.clamp(-EXPONENT, EXPONENT).to(values.dtype))
    return (values / scale).square().sum(dim).sqrt() * scale.squeeze(dim)
