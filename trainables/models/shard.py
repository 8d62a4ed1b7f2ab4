"""The rows of clients on a device, and what a model says of them beside gradients."""

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

EVEN = 16  # numbers that a row is filled up to on a GPU: products of rows that begin anywhere are far slower


def pitch(columns: int, device: str) -> int:
    """How far apart rows of so many numbers lie."""
    return columns if device == "cpu" else -(-columns // EVEN) * EVEN


@dataclass(frozen=True)
class Shard:
    """Rows of one or more clients, resident on a device: features with the constant 1 appended, norms, labels.

    Several clients stand side by side, filled up to the longest. A filling row has an infinite norm: its gradient is
    clipped to nothing.
    """

    x: torch.Tensor
    """(clients, rows, features + 1)"""
    norm: torch.Tensor
    """(clients, rows, 1)"""
    y: torch.Tensor
    """(clients, rows)"""
    size: torch.Tensor
    """(clients, 1, 1): |D_i|, a public constant that releases are divided by."""
    precision: Precision = "float32"
    """Of the products of gradients. In bf16 the features are kept so: half the memory, and what they were rounded to is
    what the client has."""

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
        """`rows`: what every client is filled up to, if not the longest. `sizes`: the public |D_i|, if not the rows."""
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
        """Some rows of every client; `size` stays what it was."""
        longest = max(1, *(len(rows) for rows in chosen))
        index = np.zeros((len(chosen), longest), dtype=np.int64)
        filling = np.ones((len(chosen), longest, 1), dtype=bool)
        for client, rows in enumerate(chosen):
            index[client, : len(rows)] = rows
            filling[client, : len(rows)] = False
        device = self.x.device
        pick = (torch.arange(len(chosen), device=device).unsqueeze(1), torch.from_numpy(index).to(device))
        nothing = torch.from_numpy(filling).to(device)
        x, norm = self.x[pick].masked_fill_(nothing, 0), self.norm[pick].masked_fill_(nothing, math.inf)
        return replace(self, x=x, norm=norm, y=self.y[pick])

    def gram(self, bound: float) -> torch.Tensor:
        """For every client, the sum over the rows of x x^T, every x clipped to l2 norm `bound`; flat, in float64."""
        x = self.x.to(self.norm)
        scaled = x * (bound / self.norm).clamp(max=1) if bound < math.inf else x
        total = torch.zeros(self.clients, self.x.shape[2], self.x.shape[2], dtype=torch.float64, device=self.x.device)
        add_products(total, scaled, scaled)
        return total.flatten(1)

    def feature_sum(self, bound: float) -> torch.Tensor:
        """For every client, the sum over the rows of their features, clipped to l2 norm `bound`; in float64."""
        features = self.x[..., :-1].double()
        norm = torch.linalg.vector_norm(features, dim=2, keepdim=True)
        return (features * (bound / norm).clamp(max=1)).sum(1)

    def spectrum(self, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Eigenvalues and eigenvectors of the mean of x x^T, every x clipped to l2 norm `bound`: found once."""
        if bound not in self._spectra:
            gram = self.gram(bound).unflatten(1, (-1, self.x.shape[2])) / self.size
            values, vectors = torch.linalg.eigh(gram.double())
            self._spectra[bound] = values.clamp(min=0).to(self.norm), vectors.to(self.norm)
        return self._spectra[bound]

    @cached_property
    def _spectra(self) -> dict[float, tuple[torch.Tensor, torch.Tensor]]:
        return {}

    @property
    def padded(self) -> torch.Tensor:
        """`x` with what lies between its rows, if anything does: numbers that no weight is for. Products of whole
        multiples of 16 are two or three times as fast in tf32 and bf16."""
        clients, rows, _ = self.x.shape
        return self.x.as_strided((clients, rows, self.x.stride(1)), self.x.stride())

    def aligned(self, width: int) -> torch.Tensor:
        """The features alone, filled up with zeros to so many: made once."""
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
        """(clients,): how many rows of each are no filling."""
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
    """What only the experimenter sees: sums over a client's rows, (clients, lanes). Not private, never a release. In
    single precision, of which very large numbers add up exactly, too."""

    loss: torch.Tensor
    clipped: torch.Tensor
