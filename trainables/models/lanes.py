"""Lanes in blocks of one fixed shape.

A matrix product may round differently for another width, so lanes are always computed a fixed number at a time, the
last block filled up with zeros: a lane's arithmetic does not depend on how many others share its pack, nor on which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainables.lazy import torch

MOST_CLIENTS = 256  # at once on a GPU: every client has a release for every lane, and its memory has an end
FEWEST = 1024  # rows of a chunk on a GPU
FILL = 32  # small clients are filled up to a multiple of so many rows


@dataclass(frozen=True)
class Shape:
    """How a device likes its work cut: fixed per kind of device, since it decides how sums are rounded."""

    lanes: int
    rows_together: int | None
    """Rows of the clients that a host computes at once. On a CPU about what fills the caches: of small clients several.
    A GPU takes as many as `MOST_CLIENTS` (None), or many small steps would leave it idle."""
    cells: int
    """Rows x classes x lanes of one chunk: on a CPU what fits the second-level cache."""

    def rows(self, width: int, clients: int = 1) -> int:
        """Rows of a chunk, for so many numbers a row and lane: a power of two, at least 64. On a CPU whatever the
        clients computed together: how a client's sum is cut must not depend on the others."""
        together = clients if self.rows_together is None else 1
        return max(64, 1 << (self.cells // (width * together * self.lanes)).bit_length() - 1)

    def chunk(self, width: int, clients: int) -> tuple[int, int]:
        """Clients and rows of a chunk. One by one where together each would have few rows: every chunk's sum, as large
        as the weights of its clients, is added to the total."""
        step = self.rows(width, clients)
        if self.rows_together is None and step < FEWEST:
            return 1, self.rows(width)
        return clients, step

    def batches(self, clients: Sequence[int], sizes: Sequence[int], apart: bool) -> list[tuple[tuple[int, ...], int]]:
        """Clients to compute together, and the rows that each of them is filled up to. On a CPU these depend on the
        client alone: how many rows a product has may change how it is rounded, with whom it is computed does not.
        `apart`: better one by one, where the device allows it."""
        if self.rows_together is None:
            # those of like size together, which saves filling
            by_size = sorted(clients, key=lambda client: (-sizes[client], client))
            cut = [by_size[start : start + MOST_CLIENTS] for start in range(0, len(by_size), MOST_CLIENTS)]
            return [(tuple(sorted(some)), sizes[some[0]]) for some in cut]
        if apart:
            return [((client,), sizes[client]) for client in clients]
        by_rows: dict[int, list[int]] = {}
        for client in clients:
            size = sizes[client]
            rows = size if size > self.rows_together // 2 else -(-size // FILL) * FILL
            by_rows.setdefault(rows, []).append(client)
        return [
            (tuple(alike[start : start + length]), rows)
            for rows, alike in sorted(by_rows.items())
            for length in [max(1, self.rows_together // rows)]
            for start in range(0, len(alike), length)
        ]


SHAPES = {
    "cpu": Shape(lanes=16, rows_together=1024, cells=1 << 18),
    "cuda": Shape(lanes=64, rows_together=None, cells=1 << 28),
}


def to_blocks(theta: torch.Tensor, rows: int, classes: int, lanes: int) -> torch.Tensor:
    """Weights (client, lane, row x class) as (block, client, row, class x lane): lanes innermost, so that what is done
    class by class runs over contiguous lanes."""
    clients, have, size = theta.shape
    count = -(-have // lanes)
    padded = torch.zeros(clients, count * lanes, size, dtype=theta.dtype, device=theta.device)
    padded[:, :have] = theta
    blocks = padded.view(clients, count, lanes, rows, classes).permute(1, 0, 3, 4, 2)
    return blocks.reshape(count, clients, rows, classes * lanes)


def from_blocks(blocks: torch.Tensor, classes: int, lanes: int, count: int) -> torch.Tensor:
    """The inverse of `to_blocks`, without the filling. Contiguous however many blocks there are: a sum over weights may
    round by their strides."""
    number, clients, rows, _ = blocks.shape
    whole = blocks.view(number, clients, rows, classes, lanes).permute(1, 0, 4, 2, 3)
    return whole.reshape(clients, number * lanes, rows * classes)[:, :count].contiguous()


SUMMED = 1024  # rows whose contributions are added up in float32; such sums are added in float64


def add_products(total: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> None:
    """Add x^T values of every client, (clients, rows, ...), to a total in float64. A long float32 sum would move by
    more than what one row contributes when that row changes, for its last digits change too."""
    for start in range(0, x.shape[1], SUMMED):
        rows = slice(start, start + SUMMED)
        total += torch.bmm(x[:, rows].mT, values[:, rows])


def in_fixed_blocks(function: Callable[..., torch.Tensor], *laned: torch.Tensor) -> torch.Tensor:
    """A function of (lanes, ...) that multiplies matrices lane by lane. A GPU may round such products by how many there
    are: it is given a fixed number of them, the last block filled up with its first lane."""
    if not laned[0].is_cuda:
        return function(*laned)
    size, parts = SHAPES["cuda"].lanes, []
    for start in range(0, laned[0].shape[0], size):
        some = [value[start : start + size] for value in laned]
        here = some[0].shape[0]
        whole = [torch.cat([value, value[:1].expand(size - here, *value.shape[1:])]) for value in some]
        parts.append(function(*whole)[:here])
    return torch.cat(parts)


def vector_to_blocks(values: torch.Tensor, lanes: int) -> torch.Tensor:
    """One number per lane as (block, lane), filled up with ones."""
    count = -(-values.shape[0] // lanes)
    padded = torch.ones(count * lanes, dtype=values.dtype, device=values.device)
    padded[: values.shape[0]] = values
    return padded.view(count, lanes)
