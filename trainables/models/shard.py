"""The rows of one or more clients on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.choices import Precision
from trainables.lazy import torch
from trainables.models.centres import Centres
from trainables.models.lanes import add_products
from trainables.models.products import Products
from trainables.privacy import lengths

ALIGNMENT = 16  # on a GPU, rows are padded to a multiple of this many numbers: products of unaligned rows are slow


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
    """(clients, rows, 1); with centres, (clients, rows, centres): the norm with each centre subtracted."""
    y: torch.Tensor
    """(clients, rows)"""
    size: torch.Tensor
    """(clients, 1, 1): |D_i|, a public constant that divides releases."""
    precision: Precision = "float32"
    """Precision of the matrix products in gradients. With bf16 the features are rounded too, after centring, and the
    rounded features count as the client's data. A GPU stores them in half the memory."""
    centres: Centres | None = None
    """The centres of the lanes; `x` has the raw features. None: `x` has the features that all lanes use."""
    is_sample: bool = False
    """Whether the rows are a random sample. Then only the padded number of rows is public."""

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
        norm = _norms(placed, dtype)
        norm[norm == 0] = math.inf
        public = sizes or [len(y) for _, y in parts]
        size = torch.tensor(public, dtype=dtype, device=device).view(-1, 1, 1)
        return cls(placed, norm, torch.from_numpy(labels).to(device), size, precision)

    def with_centres(self, centres: Centres, precision: Precision = "float32") -> Shard:
        """The same rows for lanes with these centres. `self` has raw features in float32."""
        shard = replace(self, centres=centres, precision=precision)
        norms = [shard.centred(centre).norm for centre in range(len(centres.means))]
        return self._same_rows(centres=centres, precision=precision, norm=torch.cat(norms, dim=2))

    def centred(self, centre: int) -> Shard:
        """The rows with a centre subtracted, scaled by its factor."""
        assert self.centres is not None
        raw, mean = self.padded, self.centres.means[centre].to(self.x)
        real = torch.isfinite(self.norm[..., :1])
        x = raw - torch.nn.functional.pad(mean, (0, raw.shape[2] - len(mean)))
        if self.centres.factors is not None:
            x[..., : len(mean)] *= self.centres.factors[centre].to(x)
        if self.precision == "bf16":
            x = Products(self.precision).rounded(x)
        x = x.masked_fill_(~real, 0)[..., : self.x.shape[2]]
        norm = _norms(x, self.norm.dtype).masked_fill_(~real, math.inf)
        rows = replace(self, x=x, norm=norm, centres=None)
        vars(rows)["_spectra"] = self._spectra_by_centre.setdefault(centre, {})
        return rows

    def by_centre(self) -> Iterator[tuple[slice | torch.Tensor, Shard]]:
        """Lanes with the same centre, and their rows with the centre subtracted; without centres, all lanes."""
        if self.centres is None:
            yield slice(None), self
        else:
            yield from ((lanes, self.centred(centre)) for centre, lanes in self.centres.lanes.items())

    def for_lanes(self, lanes: slice | torch.Tensor) -> Shard:
        """The same rows for some of the lanes."""
        return self if self.centres is None else self._same_rows(centres=self.centres.select(lanes))

    def without_centres(self) -> Shard:
        """The raw rows, for `evaluate`."""
        return self._same_rows(centres=None)

    def _same_rows(self, **changes: Any) -> Shard:
        shard = replace(self, **changes)
        vars(shard)["_aligned"] = self._aligned
        return shard

    def norm_columns(self, lanes: int) -> torch.Tensor:
        """(lanes,): the column of `norm` that each lane uses."""
        centres = self.centres_for(lanes)
        return torch.zeros(lanes, dtype=torch.int64, device=self.x.device) if centres is None else centres.of_lane

    def centres_for(self, lanes: int) -> Centres | None:
        """The centres, which must have this many lanes."""
        if self.centres is not None and len(self.centres.of_lane) != lanes:
            raise ValueError(f"the rows have centres for {len(self.centres.of_lane)} lanes, not for {lanes}")
        return self.centres

    def block_norms(self, clients: slice, rows: slice, lanes: torch.Tensor) -> torch.Tensor:
        """Norms of some rows for a block of lanes: (clients, rows, lanes), or (clients, rows, 1) without centres.
        `lanes`: the column of `norm` that each lane uses."""
        norm = self.norm[clients, rows]
        return norm if self.centres is None else norm[..., lanes]

    def sample(self, chosen: Sequence[NDArray[np.int64]], multiple: int = 1) -> Shard:
        """The chosen rows of every client, padded to a multiple of this number of rows; `size` does not change."""
        longest = -(-max(1, *(len(rows) for rows in chosen)) // multiple) * multiple
        index = np.zeros((len(chosen), longest), dtype=np.int64)
        padding = np.ones((len(chosen), longest, 1), dtype=bool)
        for client, rows in enumerate(chosen):
            index[client, : len(rows)] = rows
            padding[client, : len(rows)] = False
        device = self.x.device
        pick = (torch.arange(len(chosen), device=device).unsqueeze(1), torch.from_numpy(index).to(device))
        is_padding = torch.from_numpy(padding).to(device)
        x, norm = self.x[pick].masked_fill_(is_padding, 0), self.norm[pick].masked_fill_(is_padding, math.inf)
        return replace(self, x=x, norm=norm, y=self.y[pick], is_sample=True)

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

    def length_counts(self) -> torch.Tensor:
        """For every client, how many of its rows have a length in each bin of `lengths`; in float64."""
        length = torch.linalg.vector_norm(self.x[..., :-1].double(), dim=2)
        exponent = length.log2().floor().nan_to_num(neginf=lengths.LOWEST)
        column = (exponent - lengths.LOWEST).clamp(0, lengths.BINS - 1).long()
        counts = torch.zeros(self.clients, lengths.BINS, dtype=torch.float64, device=self.x.device)
        return counts.scatter_add_(1, column, torch.isfinite(self.norm[..., 0]).double())

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

    @cached_property
    def _spectra_by_centre(self) -> dict[int, dict[float, tuple[torch.Tensor, torch.Tensor]]]:
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
        return torch.isfinite(self.norm[..., 0]).sum(1)

    @cached_property
    def public_sizes(self) -> list[int]:
        """`size`, on the CPU."""
        sizes: list[int] = self.size.flatten().int().tolist()
        return sizes

    @cached_property
    def largest_label(self) -> int:
        return int(self.y.max()) if self.y.numel() else 0

    @property
    def clients(self) -> int:
        return self.x.shape[0]

    @property
    def rows(self) -> int:
        return self.x.shape[1]


def _norms(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=2, keepdim=True, dtype=dtype)


@dataclass(frozen=True)
class Diagnostics:
    """The sum of the losses and the number of clipped rows of every client, (clients, lanes), float32. For the
    experimenter: not private, never released."""

    loss: torch.Tensor
    clipped: torch.Tensor
