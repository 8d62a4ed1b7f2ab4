"""Lanes in blocks of a fixed shape.

The rounding of a matrix product can depend on its shape. So lanes are always computed a fixed number at a time, with
the last block padded: a lane's result does not depend on the other lanes of its pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainables.lazy import torch

MAX_CLIENTS = 256  # computed together on a GPU: memory holds one release per client and lane
MIN_ROWS = 1024  # fewest rows per client in a chunk of several clients on a GPU
ROW_MULTIPLE = 32  # small clients are padded to a multiple of this many rows
ROWS_OF_MANY = 8192  # rows of very small clients that a CPU computes together: every call costs a millisecond
WEIGHTS_OF_MANY = 1 << 14  # most weights that all these clients have together in one lane


@dataclass(frozen=True)
class Shape:
    """How work is split on a device. Fixed per device type, because it determines how sums are rounded."""

    lanes: int
    """Lanes of a block."""
    rows_together: int | None
    """Rows that are computed together. On a CPU about as many as fit the caches, so several small clients at a time.
    None on a GPU: up to `MAX_CLIENTS` clients of any size, since small steps would leave the GPU idle."""
    cells: int
    """Intermediate numbers of one chunk, such as rows x classes x lanes; on a CPU as many as fit the L2 cache."""

    def rows(self, width: int, clients: int = 1) -> int:
        """Rows of a chunk with `width` numbers per row and lane: a power of two, at least 64. On a CPU it does not
        depend on the number of clients: how a client's sum is split must not depend on other clients."""
        together = clients if self.rows_together is None else 1
        fits = self.cells // (width * together * self.lanes)
        return max(64, 1 << fits.bit_length() >> 1)

    def chunk(self, width: int, clients: int) -> tuple[int, int]:
        """The numbers of clients and rows of a chunk. On a GPU a chunk has one client if a chunk of all clients would
        have fewer than `MIN_ROWS` rows of each: adding its sums to the totals takes time in proportion to clients x
        weights, however few the rows."""
        step = self.rows(width, clients)
        if self.rows_together is None and step < MIN_ROWS:
            return 1, self.rows(width)
        return clients, step

    def batches(
        self, clients: Sequence[int], sizes: Sequence[int], weights: int, apart: bool
    ) -> list[tuple[tuple[int, ...], int]]:
        """Groups of clients to compute together, and the rows that each client is padded to. On a CPU the rows depend
        on the client alone: the number of rows can change the rounding, the other clients cannot.
        `weights`: number of weights in one lane. `apart`: compute one client at a time."""
        if apart:
            return [((client,), sizes[client]) for client in clients]
        if self.rows_together is None:
            # clients of similar size together, which needs less padding
            by_size = sorted(clients, key=lambda client: (-sizes[client], client))
            cut = [by_size[start : start + MAX_CLIENTS] for start in range(0, len(by_size), MAX_CLIENTS)]
            return [(tuple(sorted(some)), sizes[some[0]]) for some in cut]
        by_rows: dict[int, list[int]] = {}
        for client in clients:
            size = sizes[client]
            rows = size if size > self.rows_together // 2 else -(-size // ROW_MULTIPLE) * ROW_MULTIPLE
            by_rows.setdefault(rows, []).append(client)
        return [
            (tuple(alike[start : start + length]), rows)
            for rows, alike in sorted(by_rows.items())
            for length in [max(1, self.rows_together // rows, min(ROWS_OF_MANY // rows, WEIGHTS_OF_MANY // weights))]
            for start in range(0, len(alike), length)
        ]


SHAPES = {
    "cpu": Shape(lanes=16, rows_together=1024, cells=1 << 18),
    "cuda": Shape(lanes=64, rows_together=None, cells=1 << 28),
}


def to_blocks(theta: torch.Tensor, rows: int, classes: int, lanes: int) -> torch.Tensor:
    """Weights (client, lane, row x class) as (block, client, row, class x lane): lanes are innermost, so operations per
    class run over contiguous memory."""
    clients, have, size = theta.shape
    count = -(-have // lanes)
    padded = torch.zeros(clients, count * lanes, size, dtype=theta.dtype, device=theta.device)
    padded[:, :have] = theta
    blocks = padded.view(clients, count, lanes, rows, classes).permute(1, 0, 3, 4, 2)
    return blocks.reshape(count, clients, rows, classes * lanes)


def from_blocks(blocks: torch.Tensor, classes: int, lanes: int, count: int) -> torch.Tensor:
    """The inverse of `to_blocks`, without padding. Always contiguous: the rounding of a sum can depend on strides."""
    number, clients, rows, _ = blocks.shape
    whole = blocks.view(number, clients, rows, classes, lanes).permute(1, 0, 4, 2, 3)
    return whole.reshape(clients, number * lanes, rows * classes)[:, :count].contiguous()


FLOAT32_ROWS = 1024  # rows that are added up in float32; these sums are added in float64


def add_products(total: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> None:
    """total += x^T values for every client, with x and values (clients, rows, ...), total in float64. In a long float32
    sum, changing one row could change the result by more than that row's contribution, through rounding."""
    for start in range(0, x.shape[1], FLOAT32_ROWS):
        rows = slice(start, start + FLOAT32_ROWS)
        total += torch.bmm(x[:, rows].mT, values[:, rows])


MAX_CELLS = 1 << 27  # numbers of the tiles' products in a GPU's memory


def add_tile_products(total: torch.Tensor, x: torch.Tensor, values: torch.Tensor, tile: int) -> None:
    """`add_products` with float32 sums of only `tile` rows. One call multiplies many tiles, on a CPU all of them."""
    whole = x.shape[1] // tile * tile
    if whole:
        left, right = (part[:, :whole].unflatten(1, (-1, tile)) for part in (x, values))
        if total.is_cuda:
            step = max(1, MAX_CELLS // total.numel())
            for start in range(0, left.shape[1], step):
                some = slice(start, start + step)
                total += (left[:, some].mT @ right[:, some]).sum(1, dtype=torch.float64)
        else:
            for product in (left.mT @ right).unbind(1):
                total += product
    if whole < x.shape[1]:
        total += torch.bmm(x[:, whole:].mT, values[:, whole:])


def in_fixed_blocks(function: Callable[..., torch.Tensor], *laned: torch.Tensor) -> torch.Tensor:
    """Apply a function of (lanes, ...) that multiplies matrices lane by lane. On a GPU the rounding can depend on the
    number of lanes, so it is called with a fixed number; the last block is padded with copies of its first lane."""
    if not laned[0].is_cuda:
        return function(*laned)
    size, parts = SHAPES["cuda"].lanes, []
    for start in range(0, laned[0].shape[0], size):
        some = [value[start : start + size] for value in laned]
        here = some[0].shape[0]
        whole = [torch.cat([value, value[:1].expand(size - here, *value.shape[1:])]) for value in some]
        parts.append(function(*whole)[:here])
    return torch.cat(parts)


def vector_to_blocks(values: torch.Tensor, lanes: int, padding: int = 1) -> torch.Tensor:
    """One number per lane as (block, lane)."""
    count = -(-values.shape[0] // lanes)
    padded = torch.full((count * lanes,), padding, dtype=values.dtype, device=values.device)
    padded[: values.shape[0]] = values
    return padded.view(count, lanes)
