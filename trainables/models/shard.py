"""The rows of one or more clients on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainables.choices import Precision
from trainables.lazy import torch
from trainables.models.lanes import add_products
from trainables.models.products import Products

ALIGNMENT = 16  # rows are padded to a multiple of this on a GPU: products of unaligned rows are far slower


def pitch(columns: int, device: str) -> int:
    """Distance in memory between rows of `columns` numbers."""
    return columns if device == "cpu" else -(-columns // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Shard:
    """Rows of one or more clients: features with a constant 1 appended, their norms, labels.

    All clients are padded to the same number of rows. A padding row has an infinite norm, so its gradient is clipped
    to 0.
    """

    x: torch.Tensor
    """(clients, rows, features + 1)"""
    norm: torch.Tensor
    """(clients, rows, 1)"""
    y: torch.Tensor
    """(clients, rows)"""
    size: torch.Tensor
    """(clients, 1, 1): |D_i|, a public constant that divides releases."""
    precision: Precision = "float32"
    """Of the matrix products of gradients. With bf16 the features are stored in bf16 too: half the memory, and the
    rounded features are the client's data."""

    @classmethod
    def build(
        cls,
        parts: Sequence[tuple[NDArray[np.float32], NDArray[np.int64]]],
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        rows: int | None = None,
        sizes: Sequence[int] | None = None,
        precision: Precision = "float32",
    ) -> Shard:
        """`rows`: rows to pad every client to; default: the longest. `sizes`: the public |D_i|; default: the rows."""
        rows, dtype = rows or max(len(y) for _, y in parts), dtype or torch.float32
        features = parts[0][0].shape[1]
        x = np.zeros((len(parts), rows, pitch(features + 1, device)), dtype=np.float32)
        labels = np.zeros((len(parts), rows), dtype=np.int64)
        for client, (features_of, labels_of) in enumerate(parts):
            x[client, : len(labels_of), :features] = features_of
            x[client, : len(labels_of), features] = 1
            labels[client, : len(labels_of)] = labels_of
        placed = torch.from_numpy(x).to(device=device, dtype=dtype)
        if precision == "bf16":
            placed = Products(precision).rounded(placed)
        placed = placed[..., : features + 1]
        norm = torch.linalg.vector_norm(placed, dim=2, keepdim=True, dtype=dtype)
        norm[norm == 0] = math.inf
        public = sizes or [len(y) for _, y in parts]
        size = torch.tensor(public, dtype=dtype, device=device).view(-1, 1, 1)
        return cls(placed, norm, torch.from_numpy(labels).to(device), size, precision)

    def sample(self, chosen: Sequence[NDArray[np.int64]]) -> Shard:
        """The chosen rows of every client; `size` does not change."""
        longest = max(1, *(len(rows) for rows in chosen))
        index = np.zeros((len(chosen), longest), dtype=np.int64)
        padding = np.ones((len(chosen), longest, 1), dtype=bool)
        for client, rows in enumerate(chosen):
            index[client, : len(rows)] = rows
            padding[client, : len(rows)] = False
        device = self.x.device
        pick = (torch.arange(len(chosen), device=device).unsqueeze(1), torch.from_numpy(index).to(device))
        is_padding = torch.from_numpy(padding).to(device)
        x, norm = self.x[pick].masked_fill_(is_padding, 0), self.norm[pick].masked_fill_(is_padding, math.inf)
        return replace(self, x=x, norm=norm, y=self.y[pick])

    def gram(self, bound: float) -> torch.Tensor:
        """For every client, sum of x x^T over its rows, every x clipped to l2 norm `bound`; flattened, in float64."""
        x = self.x.to(self.norm)
        scaled = x * (bound / self.norm).clamp(max=1) if bound < math.inf else x
        total = torch.zeros(self.clients, self.x.shape[2], self.x.shape[2], dtype=torch.float64, device=self.x.device)
        add_products(total, scaled, scaled)
        return total.flatten(1)

    def feature_sum(self, bound: float) -> torch.Tensor:
        """For every client, the sum of its rows' features, each clipped to l2 norm `bound`; in float64."""
        features = self.x[..., :-1].double()
        norm = torch.linalg.vector_norm(features, dim=2, keepdim=True)
        return (features * (bound / norm).clamp(max=1)).sum(1)

    def spectrum(self, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Eigenvalues and eigenvectors of the mean of x x^T, every x clipped to l2 norm `bound`; in float64,
        computed once."""
        if bound not in self._spectra:
            gram = self.gram(bound).unflatten(1, (-1, self.x.shape[2])) / self.size
            values, vectors = torch.linalg.eigh(gram.double())
            self._spectra[bound] = values.clamp(min=0), vectors
        return self._spectra[bound]

    @cached_property
    def _spectra(self) -> dict[float, tuple[torch.Tensor, torch.Tensor]]:
        return {}

    @property
    def padded(self) -> torch.Tensor:
        """`x` including the padding between its rows: products whose sizes are multiples of 16 are two or three times
        as fast in tf32 and bf16."""
        clients, rows, _ = self.x.shape
        return self.x.as_strided((clients, rows, self.x.stride(1)), self.x.stride())

    def aligned(self, width: int) -> torch.Tensor:
        """The features without the constant, padded with zeros to `width`; computed once."""
        if width not in self._aligned:
            made = self._aligned[width] = torch.zeros(
                *self.x.shape[:2], width, dtype=self.x.dtype, device=self.x.device
            )
            made[..., : self.x.shape[2] - 1] = self.x[..., :-1]
        return self._aligned[width]

    @cached_property
    def _aligned(self) -> dict[int, torch.Tensor]:
        return {}

    @cached_property
    def real_rows(self) -> torch.Tensor:
        """(clients,): number of rows without padding."""
        return torch.isfinite(self.norm).sum((1, 2))

    @cached_property
    def largest_label(self) -> int:
        return int(self.y.max()) if self.y.numel() else 0

    @property
    def clients(self) -> int:
        return self.x.shape[0]

    @property
    def rows(self) -> int:
        return self.x.shape[1]


@dataclass(frozen=True)
class Diagnostics:
    """Sums over a client's rows for the experimenter, (clients, lanes), float32. Not private, never released."""

    loss: torch.Tensor
    clipped: torch.Tensor
