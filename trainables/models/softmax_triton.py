"""The softmax head on a GPU, in Triton: one pass over a client's rows, without writing logits to memory.

1. `_gradient_parts`: a program takes PART rows of one client and a few lanes. It computes logits, softmax and clipped
   residuals, and stores the part's gradient sum.
2. `_add_parts` adds the parts in float64, always in the same order: no atomic additions, so results are deterministic.

How rows are split depends only on the client, and the columns of a product are independent, so a lane's result does not
depend on other lanes. Padding rows are skipped. A float32 product is computed as three tf32 products (tf32x3), with the
accuracy of float32. In bf16, rows, weights and clipped residuals are rounded as in `products`, the constant's included.
If features are centred, the lanes of a program have the same centre, which the program subtracts from the rows as it
loads them.

Heads with many classes or features do not fit the registers. Torch computes their products, and `_residuals_in_place`
the clipped residuals. Centres then move into the constant (float32), or the lanes of each centre are computed
separately (tf32, bf16).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from trainables.models import clipping, residuals
from trainables.models.centres import Groups
from trainables.models.residuals import RowDiagnostics
from trainables.models.shard import Diagnostics, Shard

PART = 1024  # rows of a part, which are summed in float32
WARPS, STAGES = 4, 1
MAX_FEATURES = 128
MAX_CLASSES = 128
MAX_BYTES = 1 << 30  # of part sums in memory
LOG2E = math.log2(math.e)
LEAST = tl.constexpr(residuals.LEAST)
SOFTENING = tl.constexpr(clipping.SOFTENING)
# of products: how float32 factors are multiplied (bf16 ignores it), and the type that factors are rounded to
PRODUCTS = {"float32": ("tf32x3", tl.float32), "tf32": ("tf32", tl.float32), "bf16": ("tf32", tl.bfloat16)}
# without this Triton recompiles (a second or more) when one of these becomes a multiple of 16
SIZES = ["most", "parts", "of_client", "first", "count", "rows", "lanes", "width", "centres", "norms"]


class Tile(NamedTuple):
    """The sizes of the tile that a program computes at a time; powers of two."""

    features: int
    classes: int
    lanes: int
    rows: int

    @classmethod
    def of(cls, features: int, classes: int) -> Tile:
        """Fastest on an H200: 64 rows x 64 columns; with more than 64 classes, 32 rows and one lane."""
        C = max(2, triton.next_power_of_2(classes))
        return cls(max(16, triton.next_power_of_2(features)), C, max(1, 64 // C), 64 if C <= 64 else 32)


def fits(features: int, classes: int) -> bool:
    """Whether a tile of all features and classes fits the registers."""
    if features > MAX_FEATURES or classes > MAX_CLASSES:
        return False
    tile = Tile.of(features, classes)
    return tile.features * tile.classes * tile.lanes <= 64 * 128  # the accumulators are in registers


@triton.jit
def _clip_factor(clip, length, AUTOMATIC: tl.constexpr):
    return clip / (length + SOFTENING) if AUTOMATIC else tl.minimum(clip / length, 1.0)


@triton.jit
def _residuals(z, real, y, norm, clip, classes, DIAGNOSE: tl.constexpr, AUTOMATIC: tl.constexpr):
    """Clipped residuals of logits in base 2 (rows, lanes, classes); loss and number of clipped rows per lane."""
    top = tl.max(z, 2)
    shifted = z - top[:, :, None]
    power = tl.where(shifted < LEAST, 0.0, tl.exp2(shifted))
    is_label = classes[None, None, :] == y[:, None, None]
    # 1 - p_y as the sum of the other classes' probabilities, without a subtraction
    others = tl.where(is_label, 0.0, power)
    lost = tl.sum(others, 2)
    whole = tl.sum(power, 2)
    length = tl.sqrt(tl.sum(others * others, 2) + lost * lost) / whole * norm[:, None]
    factor = _clip_factor(clip[None, :], length, AUTOMATIC)
    scale = tl.where(real[:, None], factor / whole, 0.0)
    residual = tl.where(is_label, -lost[:, :, None], others) * scale[:, :, None]
    loss = tl.zeros((z.shape[1],), tl.float32)
    clipped = tl.zeros((z.shape[1],), tl.float32)
    if DIAGNOSE:
        of_label = tl.sum(tl.where(is_label, z, 0.0), 2) - top
        loss = tl.sum(tl.where(real[:, None], tl.log2(whole) - of_label, 0.0), 0)
        clipped = tl.sum(tl.where(real[:, None] & (factor < 1.0), 1.0, 0.0), 0)
    return residual, loss, clipped


@triton.jit
def _weights(theta, lane, feature, label, used, features, count, log2e, classes):
    """Weights for logits in base 2 (features, columns), and the constant's row; padding classes have logit -inf."""
    place = theta + lane * (features + 1) * classes + label
    known = used & (lane < count)
    w = tl.load(
        place[None, :] + feature[:, None] * classes, mask=known[None, :] & (feature < features)[:, None], other=0.0
    )
    b = tl.load(place + features * classes, mask=known, other=0.0)
    return w * log2e, tl.where(used, b * log2e, float("-inf"))


@triton.jit(do_not_specialize=SIZES)
def _gradient_parts(
    X, Y, NORM, ROWS, MEANS, CENTRE, THETA, CLIP, SUMS, LOSS, CLIPPED, most, parts, of_client, first, count, centres,
    features: tl.constexpr, classes: tl.constexpr, D: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    TILE: tl.constexpr, PART: tl.constexpr, LOG2E: tl.constexpr, DIAGNOSE: tl.constexpr, AUTOMATIC: tl.constexpr,
    PRODUCTS: tl.constexpr, FACTORS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """One part of one client, for L of the `count` lanes, starting from `first`. CENTRE: the centre of every
    group of L lanes. MEANS has a row, and NORM a column, for each of the `centres`."""
    client, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    rows = tl.load(ROWS + client)
    if part * PART >= rows:
        return
    feature, column, label = tl.arange(0, D), tl.arange(0, L * C), tl.arange(0, C)
    of_column, used = column % C, column % C < classes
    lane = first + tl.program_id(0) * L + column // C
    w, b = _weights(
        THETA + client.to(tl.int64) * of_client, lane, feature, of_column, used, features, count, LOG2E, classes
    )
    w, b = w.to(FACTORS), b.to(FACTORS).to(tl.float32)
    mine = first + tl.program_id(0) * L + tl.arange(0, L)
    clip = tl.load(CLIP + mine, mask=mine < count, other=1.0)
    total = tl.zeros((D, L * C), tl.float32)
    constant = tl.zeros((L * C,), tl.float32)
    losses = tl.zeros((L,), tl.float32)
    cut = tl.zeros((L,), tl.float32)
    begin = client.to(tl.int64) * most
    centre = 0
    if CENTRED:
        centre = tl.load(CENTRE + first // L + tl.program_id(0))
        mean = tl.load(MEANS + centre * D + feature)
    for start in range(part * PART, tl.minimum(rows, (part + 1) * PART), TILE):
        row = start + tl.arange(0, TILE)
        real = row < rows
        x = tl.load(X + (begin + row)[:, None] * D + feature[None, :], mask=real[:, None], other=0.0)
        if CENTRED:
            x = x - mean[None, :]  # padding rows have no residual
        x = x.to(FACTORS)
        y = tl.load(Y + begin + row, mask=real, other=0)
        norm = tl.load(NORM + (begin + row) * centres + centre, mask=real, other=1.0)
        z = tl.reshape(tl.dot(x, w, input_precision=PRODUCTS) + b[None, :], (TILE, L, C))
        residual, loss, clipped = _residuals(z, real, y, norm, clip, label, DIAGNOSE, AUTOMATIC)
        flat = tl.reshape(residual, (TILE, L * C)).to(FACTORS)
        total += tl.dot(tl.trans(x), flat, input_precision=PRODUCTS)
        constant += tl.sum(flat.to(tl.float32), 0)
        losses += loss
        cut += clipped
    width = (features + 1) * classes
    slot = tl.program_id(1).to(tl.int64) * tl.num_programs(0) * L
    place = SUMS + (slot + lane - first) * width + of_column
    stored = used & (lane < count)
    tl.store(place[None, :] + feature[:, None] * classes, total, mask=stored[None, :] & (feature < features)[:, None])
    tl.store(place + features * classes, constant, mask=stored)
    if DIAGNOSE:
        tl.store(LOSS + slot + mine - first, losses)
        tl.store(CLIPPED + slot + mine - first, cut)


@triton.jit(do_not_specialize=SIZES)
def _add_parts(SUMS, ROWS, TOTAL, parts, lanes, first, count, width, BLOCK: tl.constexpr, PART: tl.constexpr):
    """Sum of a client's parts in order, in float64."""
    client = tl.program_id(1)
    rows = tl.load(ROWS + client)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.minimum(lanes, count - first) * width
    total = tl.zeros((BLOCK,), tl.float64)
    for part in range(0, tl.cdiv(rows, PART)):
        slot = (client * parts + part).to(tl.int64) * lanes * width
        total += tl.load(SUMS + slot + at, mask=inside, other=0.0).to(tl.float64)
    tl.store(TOTAL + (client.to(tl.int64) * count + first) * width + at, total, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _evaluate(
    X, Y, MEANS, CENTRE, THETA, LOSS, RIGHT, rows, count, features: tl.constexpr, classes: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, L: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, LOG2E: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """The losses of one part of the rows for L lanes, in base 2, and whether each row is classified correctly."""
    part = tl.program_id(1)
    feature, column, label = tl.arange(0, D), tl.arange(0, L * C), tl.arange(0, C)
    of_column, used = column % C, column % C < classes
    lane = tl.program_id(0) * L + column // C
    w, b = _weights(THETA, lane, feature, of_column, used, features, count, LOG2E, classes)
    mine = tl.program_id(0) * L + tl.arange(0, L)
    losses = tl.zeros((L,), tl.float32)
    if CENTRED:
        mean = tl.load(MEANS + tl.load(CENTRE + tl.program_id(0)) * D + feature)
    for start in range(part * PART, tl.minimum(rows, (part + 1) * PART), TILE):
        row = start + tl.arange(0, TILE)
        real = row < rows
        x = tl.load(X + row.to(tl.int64)[:, None] * D + feature[None, :], mask=real[:, None], other=0.0)
        if CENTRED:
            x = x - mean[None, :]
        y = tl.load(Y + row, mask=real, other=0)
        z = tl.reshape(tl.dot(x, w, input_precision="tf32x3") + b[None, :], (TILE, L, C))
        is_label = label[None, None, :] == y[:, None, None]
        of_label = tl.sum(tl.where(is_label, z, 0.0), 2)
        highest = tl.max(tl.where(is_label, float("-inf"), z), 2)
        top = tl.maximum(of_label, highest)
        whole = tl.sum(tl.exp2(z - top[:, :, None]), 2)
        losses += tl.sum(tl.where(real[:, None], tl.log2(whole) + top - of_label, 0.0), 0)
        right = (of_label > highest) & (whole == whole)  # nan is never right
        place = RIGHT + mine.to(tl.int64)[None, :] * rows + row[:, None]
        tl.store(place, right, mask=real[:, None] & (mine < count)[None, :])
    tl.store(LOSS + part * count + mine, losses, mask=mine < count)


@triton.jit(do_not_specialize=SIZES)
def _residuals_in_place(
    Z, Y, NORM, CLIP, LOSS, CLIPPED, of_client, rows, classes, lanes, norms,
    C: tl.constexpr, L: tl.constexpr, DIAGNOSE: tl.constexpr, AUTOMATIC: tl.constexpr,
):  # fmt: skip
    """Clipped residuals of logits (client, row, class, lane), in place, C classes at a time. `of_client`: the distance
    of clients in memory. `norms`: norms per row, 1 or one per lane."""
    row, client = tl.program_id(0), tl.program_id(1)
    lane, some = tl.program_id(2) * L + tl.arange(0, L), tl.arange(0, C)
    known = lane < lanes
    at = client.to(tl.int64) * rows + row
    y = tl.load(Y + at)
    norm = tl.load(NORM + at * norms + lane % norms, mask=known, other=1.0)
    place = Z + client.to(tl.int64) * of_client + row.to(tl.int64) * classes * lanes + lane
    clip = tl.load(CLIP + lane, mask=known, other=1.0)
    top = tl.full((L,), float("-inf"), tl.float32)
    whole = tl.zeros((L,), tl.float32)
    for start in range(0, classes, C):  # streaming softmax: sums are relative to the largest logit so far
        k = start + some
        inside = (k < classes)[:, None] & known[None, :]
        z = tl.load(place[None, :] + k[:, None] * lanes, mask=inside, other=float("-inf"))
        higher = tl.maximum(top, tl.max(z, 0))
        whole = whole * tl.exp2(top - higher) + tl.sum(tl.exp2(z - higher[None, :]), 0)
        top = higher
    of_label = tl.load(place + y * lanes, mask=known, other=0.0) - top
    lost = tl.zeros((L,), tl.float32)
    squares = tl.zeros((L,), tl.float32)
    for start in range(0, classes, C):
        k = start + some
        inside = (k < classes)[:, None] & known[None, :]
        z = tl.load(place[None, :] + k[:, None] * lanes, mask=inside & (k != y)[:, None], other=float("-inf"))
        power = tl.where(z - top[None, :] < LEAST, 0.0, tl.exp2(z - top[None, :]))
        lost += tl.sum(power, 0)
        squares += tl.sum(power * power, 0)
    factor = _clip_factor(clip, tl.sqrt(squares + lost * lost) / whole * norm, AUTOMATIC)
    scale = factor / whole
    for start in range(0, classes, C):
        k = start + some
        inside = (k < classes)[:, None] & known[None, :]
        z = tl.load(place[None, :] + k[:, None] * lanes, mask=inside, other=float("-inf"))
        power = tl.where(z - top[None, :] < LEAST, 0.0, tl.exp2(z - top[None, :]))
        residual = tl.where((k == y)[:, None], -lost[None, :], power) * scale[None, :]
        tl.store(place[None, :] + k[:, None] * lanes, residual, mask=inside)
    if DIAGNOSE:
        real = norm < float("inf")
        tl.store(LOSS + at * lanes + lane, tl.where(real, tl.log2(whole) - of_label, 0.0), mask=known)
        tl.store(CLIPPED + at * lanes + lane, tl.where(real & (factor < 1.0), 1.0, 0.0), mask=known)


class _Centres(NamedTuple):
    """The centres as arguments of a kernel, with one centre for every group of lanes."""

    means: torch.Tensor
    """(centres, D)"""
    of_group: torch.Tensor
    centred: bool

    @classmethod
    def of(cls, groups: Groups | None, D: int, device: torch.device) -> _Centres:
        if groups is None:
            return cls(torch.empty(1, device=device), torch.empty(1, dtype=torch.int64, device=device), False)
        return cls(torch.nn.functional.pad(groups.means, (0, D - groups.means.shape[1])), groups.centre, True)


def clipped_gradient_sum(
    shard: Shard, theta: torch.Tensor, clip: torch.Tensor, classes: int, diagnose: bool, automatic: bool
) -> tuple[torch.Tensor, Diagnostics | None]:
    """`theta` is (clients or 1, lanes, d). The sum is (clients, lanes, d), in float64."""
    centres = shard.centres_for(theta.shape[1])
    if centres is None:
        return _gradient_sum(shard, None, theta, clip, classes, diagnose, automatic)
    groups = centres.in_groups(Tile.of(shard.x.shape[2] - 1, classes).lanes)
    laned = theta[:, groups.lane], clip[groups.lane]
    total, seen = _gradient_sum(shard, groups, *laned, classes, diagnose, automatic)
    of_lane = groups.position
    return total[:, of_lane], seen and Diagnostics(seen.loss[:, of_lane], seen.clipped[:, of_lane])


def _gradient_sum(
    shard: Shard,
    groups: Groups | None,
    theta: torch.Tensor,
    clip: torch.Tensor,
    classes: int,
    diagnose: bool,
    automatic: bool,
) -> tuple[torch.Tensor, Diagnostics | None]:
    clients, most, q = shard.x.shape
    count, width = theta.shape[1:]
    D, C, L, TILE = Tile.of(q - 1, classes)
    parts = triton.cdiv(most, PART)
    theta, centres = theta.contiguous(), _Centres.of(groups, D, theta.device)
    total = torch.empty(clients, count, width, dtype=torch.float64, device=theta.device)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for first, lanes in _groups(count, L, clients * parts * width * 4):
        sums = torch.empty(clients * parts, lanes, width, device=theta.device)
        diagnostics = torch.zeros(2, clients, parts, lanes, device=theta.device) if diagnose else sums.new_empty(2, 0)
        _gradient_parts[(lanes // L, clients * parts)](
            shard.aligned(D), shard.y, shard.norm, shard.real_rows, centres.means, centres.of_group, theta, clip, sums,
            *diagnostics, most, parts, 0 if theta.shape[0] == 1 else count * width, first, count, shard.norm.shape[2],
            q - 1, classes, D, C, L, TILE, PART, LOG2E, diagnose, automatic, *PRODUCTS[shard.precision],
            centres.centred, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        _add_parts[(triton.cdiv(lanes * width, 1024), clients)](
            sums, shard.real_rows, total, parts, lanes, first, count, width, 1024, PART
        )
        if diagnose:
            loss, cut = diagnostics.double().sum(2)[..., : count - first]
            kept.append((loss, cut))
    if not diagnose:
        return total, None
    loss, cut = (torch.cat(part, dim=1) for part in zip(*kept, strict=True))
    return total, Diagnostics((loss * math.log(2)).float(), cut.float())


def evaluate(shard: Shard, theta: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses per lane, and whether each row is classified correctly."""
    rows, q = shard.rows, shard.x.shape[2]
    D, C, L, TILE = Tile.of(q - 1, classes)
    of_lanes = shard.centres_for(theta.shape[0])
    groups = None if of_lanes is None else of_lanes.in_groups(L)
    theta = theta if groups is None else theta[groups.lane]
    parts, count, centres = triton.cdiv(rows, PART), theta.shape[0], _Centres.of(groups, D, theta.device)
    loss = torch.empty(parts, count, device=theta.device)
    right = torch.empty(count, rows, dtype=torch.bool, device=theta.device)
    _evaluate[(triton.cdiv(count, L), parts)](
        shard.aligned(D), shard.y, centres.means, centres.of_group, theta.contiguous(), loss, right, rows, count, q - 1,
        classes, D, C, L, TILE, PART, LOG2E, centres.centred, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    losses = loss.double().sum(0) * math.log(2)
    return (losses, right) if groups is None else (losses[groups.position], right[groups.position])


def clip_residuals(
    z: torch.Tensor, y: torch.Tensor, row_norm: torch.Tensor, clip: torch.Tensor, diagnose: bool, automatic: bool
) -> RowDiagnostics | None:
    """Clipped residuals of logits `z` (clients, rows, classes, lanes), in place, between torch's two products.
    `row_norm` is (clients, rows, 1) or (clients, rows, lanes)."""
    clients, rows, classes, lanes = z.shape
    if not z[0].is_contiguous():
        raise ValueError("the logits of a client must be contiguous")
    diagnostics = torch.empty(2, clients, rows, lanes, device=z.device) if diagnose else z.new_empty(2, 0)
    C, L = min(32, triton.next_power_of_2(classes)), min(32, triton.next_power_of_2(lanes))
    _residuals_in_place[(rows, clients, triton.cdiv(lanes, L))](
        z, y.contiguous(), row_norm.contiguous(), clip, *diagnostics, z.stride(0), rows, classes, lanes,
        row_norm.shape[2], C, L, diagnose, automatic, num_warps=max(1, min(4, C * L // 128)),
    )  # fmt: skip
    return RowDiagnostics(*diagnostics) if diagnose else None


def _groups(count: int, together: int, bytes_per_lane: int) -> Iterator[tuple[int, int]]:
    """(first lane, number of lanes) of groups whose part sums fit MAX_BYTES; numbers are multiples of `together`."""
    most = max(together, MAX_BYTES // bytes_per_lane // together * together)
    for first in range(0, count, most):
        yield first, triton.cdiv(min(most, count - first), together) * together
