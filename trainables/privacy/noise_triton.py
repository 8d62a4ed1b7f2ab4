"""Addressed noise on a GPU: the same numbers as `noise.py`, without waiting for the CPU.

A program generates the whole vector of one address:
1. BLAKE2b hash of the address (one block) -> key of Philox
2. 32-bit words from Philox 4x64-10, exact integer arithmetic
3. normal numbers by NumPy's ziggurat

Most words give one number each. One in eighty needs the words that follow, so where a number starts depends on all
words before it. To compute this in parallel, a word is treated as a function on six states (what the next word is used
for), and these functions are composed by a parallel scan.

The bits are NumPy's where NumPy does not fuse multiply-adds (x86). Numbers beyond 3.65 standard deviations (one in
3,800) use a logarithm, whose last bit differs between libraries; here it is correctly rounded. For about one
number in 10^8, that bit decides whether the number is accepted, and a difference would shift all later numbers.
"""

from __future__ import annotations

import math
import struct
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from trainables.privacy.noise import PERSON

CHUNK = 1024  # words processed at a time
STRIPS = 256
EDGE = 3.6541528853610087963519472518  # start of the tail with 256 strips

# ---- states: a word starts a number (START), decides whether a number in a wedge is accepted (WEDGE), or is the first
# or second word of a number in the tail, whose sign the word before determined
START = tl.constexpr(0)
WEDGE = tl.constexpr(1)
TAIL = tl.constexpr(2)  # 3 if negative
TAIL_THEN = tl.constexpr(4)  # 5 if negative
STAY = tl.constexpr(0 | 1 << 3 | 2 << 6 | 3 << 9 | 4 << 12 | 5 << 15)  # the identity function on states
EDGE_F = tl.constexpr(float(np.float32(EDGE)))
INVERSE_EDGE_F = tl.constexpr(float(np.float32(1 / EDGE)))


@triton.jit
def _mix(a, b, c, d, x, y):
    """BLAKE2b's mixing function G."""
    a = a + b + x
    d = _rotate(d ^ a, 32)
    c = c + d
    b = _rotate(b ^ c, 24)
    a = a + b + y
    d = _rotate(d ^ a, 16)
    c = c + d
    b = _rotate(b ^ c, 63)
    return a, b, c, d


@triton.jit
def _rotate(x, by: tl.constexpr):
    return (x >> by) | (x << (64 - by))


@triton.jit
def _word(WORDS, ORDER, place, seed, client, t, step):
    """A word of the message: the numbers of the address, then the purpose."""
    which = tl.load(ORDER + place)
    word = tl.load(WORDS + 16 + which).to(tl.uint64)
    word = tl.where(which == 0, seed, word)
    word = tl.where(which == 1, client, word)
    word = tl.where(which == 2, t, word)
    return tl.where(which == 3, step, word)


@triton.jit
def _key(WORDS, ORDER, seed, client, t, step):
    """BLAKE2b hash of an address: the two words of Philox's key."""
    a0 = tl.load(WORDS + 0).to(tl.uint64)
    a1 = tl.load(WORDS + 1).to(tl.uint64)
    a2 = tl.load(WORDS + 2).to(tl.uint64)
    a3 = tl.load(WORDS + 3).to(tl.uint64)
    b0 = tl.load(WORDS + 4).to(tl.uint64)
    b1 = tl.load(WORDS + 5).to(tl.uint64)
    b2 = tl.load(WORDS + 6).to(tl.uint64)
    b3 = tl.load(WORDS + 7).to(tl.uint64)
    c0 = tl.load(WORDS + 8).to(tl.uint64)
    c1 = tl.load(WORDS + 9).to(tl.uint64)
    c2 = tl.load(WORDS + 10).to(tl.uint64)
    c3 = tl.load(WORDS + 11).to(tl.uint64)
    d0 = tl.load(WORDS + 12).to(tl.uint64)
    d1 = tl.load(WORDS + 13).to(tl.uint64)
    d2 = tl.load(WORDS + 14).to(tl.uint64)
    d3 = tl.load(WORDS + 15).to(tl.uint64)
    first, second = a0, a1
    for at in range(0, 12 * 16, 16):
        x, y = _word(WORDS, ORDER, at, seed, client, t, step), _word(WORDS, ORDER, at + 1, seed, client, t, step)
        a0, b0, c0, d0 = _mix(a0, b0, c0, d0, x, y)
        x, y = _word(WORDS, ORDER, at + 2, seed, client, t, step), _word(WORDS, ORDER, at + 3, seed, client, t, step)
        a1, b1, c1, d1 = _mix(a1, b1, c1, d1, x, y)
        x, y = _word(WORDS, ORDER, at + 4, seed, client, t, step), _word(WORDS, ORDER, at + 5, seed, client, t, step)
        a2, b2, c2, d2 = _mix(a2, b2, c2, d2, x, y)
        x, y = _word(WORDS, ORDER, at + 6, seed, client, t, step), _word(WORDS, ORDER, at + 7, seed, client, t, step)
        a3, b3, c3, d3 = _mix(a3, b3, c3, d3, x, y)
        x, y = _word(WORDS, ORDER, at + 8, seed, client, t, step), _word(WORDS, ORDER, at + 9, seed, client, t, step)
        a0, b1, c2, d3 = _mix(a0, b1, c2, d3, x, y)
        x, y = _word(WORDS, ORDER, at + 10, seed, client, t, step), _word(WORDS, ORDER, at + 11, seed, client, t, step)
        a1, b2, c3, d0 = _mix(a1, b2, c3, d0, x, y)
        x, y = _word(WORDS, ORDER, at + 12, seed, client, t, step), _word(WORDS, ORDER, at + 13, seed, client, t, step)
        a2, b3, c0, d1 = _mix(a2, b3, c0, d1, x, y)
        x, y = _word(WORDS, ORDER, at + 14, seed, client, t, step), _word(WORDS, ORDER, at + 15, seed, client, t, step)
        a3, b0, c1, d2 = _mix(a3, b0, c1, d2, x, y)
    return first ^ a0 ^ c0, second ^ a1 ^ c1


@triton.jit
def _philox(at, key0, key1):
    """32-bit words of Philox 4x64-10 at these positions of its stream; the lower half of every 64 bits comes first."""
    whole = at >> 1
    zero = (at & 0).to(tl.uint64)
    c0, c1, c2, c3 = ((whole >> 2) + 1).to(tl.uint64), zero, zero, zero
    k0, k1 = zero + key0, zero + key1
    m0, m1 = zero + 0xD2E7470EE14C6C93, zero + 0xCA5A826395121157
    for _ in range(10):
        high0, low0 = tl.umulhi(m0, c0), m0 * c0
        high1, low1 = tl.umulhi(m1, c2), m1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B97F4A7C15
        k1 += 0xBB67AE8584CAA73B
    part = whole & 3
    word = tl.where(part == 0, c0, tl.where(part == 1, c1, tl.where(part == 2, c2, c3)))
    return tl.where((at & 1) == 0, word & 0xFFFFFFFF, word >> 32).to(tl.uint32)


@triton.jit
def _split(word):
    """Strip, sign bit and 23 bits of a word that starts a number."""
    return (word & 0xFF).to(tl.int32), ((word >> 8) & 1).to(tl.int32), (word >> 9).to(tl.int32)


@triton.jit
def _fraction(word):
    return (word >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _logarithm(word):
    """log(1 - fraction), rounded once to float32; 1 - fraction is exact."""
    return tl.log(1.0 - _fraction(word).to(tl.float64)).to(tl.float32)


@triton.jit
def _tail(first, second):
    """Distance beyond the edge, and whether it is accepted."""
    beyond = -INVERSE_EDGE_F * _logarithm(first)
    other = -_logarithm(second)
    return beyond, other + other > beyond * beyond


@triton.jit
def _compose(f, g):
    """The composition g after f; a function has three bits per state."""
    composed = f & 0
    for state in tl.static_range(6):
        composed |= ((g >> (((f >> (3 * state)) & 7) * 3)) & 7) << (3 * state)
    return composed


@triton.jit
def _transition(before, word, LIMITS):
    """The state transition of a word, given the word before it."""
    strip, _, bits = _split(word)
    at_once = bits < tl.load(LIMITS + strip)
    start = tl.where(at_once, START, tl.where(strip == 0, TAIL + ((bits >> 8) & 1), WEDGE))
    _, accepted = _tail(before, word)
    plus, minus = tl.where(accepted, START, TAIL), tl.where(accepted, START, TAIL + 1)
    return start | START << 3 | (TAIL_THEN << 6) | ((TAIL_THEN + 1) << 9) | (plus << 12) | (minus << 15)


@triton.jit(do_not_specialize=["T", "STEP", "seeds", "size"])
def _normals(OUT, SEEDS, CLIENTS, T, STEP, WORDS, ORDER, LIMITS, WIDTHS, HEIGHTS, seeds, size, CHUNK: tl.constexpr):
    address = tl.program_id(0)
    seed = tl.load(SEEDS + address % seeds).to(tl.uint64)
    client = tl.load(CLIENTS + address // seeds).to(tl.uint64)
    key0, key1 = _key(WORDS, ORDER, seed, client, tl.load(T).to(tl.uint64), tl.load(STEP).to(tl.uint64))
    out = OUT + address.to(tl.int64) * size
    inside = tl.arange(0, CHUNK)
    begin = address * 0
    made = address * 0
    state = address * 0
    while made < size:
        at = begin + inside
        word, before, second = _philox(at, key0, key1), _philox(at - 1, key0, key1), _philox(at - 2, key0, key1)
        transitions = tl.where(inside == 0, STAY, _transition(second, before, LIMITS))  # of the word before
        now = (tl.associative_scan(transitions, 0, _compose) >> (3 * state)) & 7  # the state before every word
        # a number from this word alone
        strip, negative, bits = _split(word)
        value = bits.to(tl.float32) * tl.load(WIDTHS + strip)
        value = tl.where(negative == 1, -value, value)
        at_once = (now == START) & (bits < tl.load(LIMITS + strip))
        # a number from the word before, which fell into a wedge
        strip, negative, bits = _split(before)
        earlier = bits.to(tl.float32) * tl.load(WIDTHS + strip)
        earlier = tl.where(negative == 1, -earlier, earlier)
        low = tl.load(HEIGHTS + strip)
        high = tl.load(HEIGHTS + strip - 1, mask=strip > 0, other=1.0)
        curve = tl.exp(-0.5 * earlier.to(tl.float64) * earlier.to(tl.float64))
        under = ((high - low) * _fraction(word) + low).to(tl.float64) < curve
        in_wedge = (now == WEDGE) & under
        # a number from the tail
        beyond, accepted = _tail(before, word)
        far = tl.where((now & 1) == 1, -(EDGE_F + beyond), EDGE_F + beyond)
        in_tail = (now >= TAIL_THEN) & accepted
        makes = (at_once | in_wedge | in_tail).to(tl.int32)
        place = made + tl.cumsum(makes, 0) - makes
        value = tl.where(in_wedge, earlier, tl.where(in_tail, far, value))
        tl.store(out + place, value, mask=(makes == 1) & (place < size))
        made += tl.sum(makes, 0)
        following = (_transition(before, word, LIMITS) >> (3 * now)) & 7
        state = tl.max(tl.where(inside == CHUNK - 1, following, 0), 0)
        begin += CHUNK


def normals(clients: torch.Tensor, seeds: torch.Tensor, t: int, step: int, purpose: str, size: int) -> torch.Tensor:
    """`Address(seed, client, t, step, purpose).normal(size)` for all clients and seeds: (clients, seeds, size)."""
    device = str(clients.device)
    return normals_at(clients, seeds, number(t, device), number(step, device), words(purpose, device), size)


def normals_at(
    clients: torch.Tensor, seeds: torch.Tensor, t: torch.Tensor, step: torch.Tensor, words: torch.Tensor, size: int
) -> torch.Tensor:
    """The same with tensors only, so that a recorded launch can be repeated for other rounds."""
    device = str(clients.device)
    out = torch.empty(len(clients), len(seeds), size, device=device)
    if out.numel():
        _normals[(len(clients) * len(seeds),)](
            out, seeds, clients, t, step, words, _order(device), *_strips(device), len(seeds), size, CHUNK,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def number(value: int, device: str) -> torch.Tensor:
    """A tensor with this number. The most common numbers are on the device already."""
    if 0 <= value < NUMBERS:
        return _numbers(device)[value : value + 1]
    return torch.tensor([value], device=device)


# ---- tables

NUMBERS = 1 << 16


@cache
def _numbers(device: str) -> torch.Tensor:
    return torch.arange(NUMBERS, device=device)


MASK = (1 << 64) - 1
INITIAL = tuple(  # the fractional parts of the square roots of the first eight primes
    math.isqrt(prime << 128) & MASK for prime in (2, 3, 5, 7, 11, 13, 17, 19)
)
ORDER = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
    (14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3),
    (11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4),
    (7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8),
    (9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13),
    (2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9),
    (12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11),
    (13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10),
    (6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5),
    (10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0),
)


@cache
def _order(device: str) -> torch.Tensor:
    """The order of message words in BLAKE2b's twelve rounds."""
    return torch.tensor([ORDER[i % 10] for i in range(12)], dtype=torch.int32, device=device).flatten()


@cache
def words(purpose: str, device: str) -> torch.Tensor:
    """BLAKE2b's initial state (16 words), and the message (16 words, without the numbers of the address)."""
    message = bytes(32) + purpose.encode()
    if len(message) > 128:
        raise ValueError(f"purpose = {purpose!r} is longer than {128 - 32} bytes")
    person = struct.unpack("<2Q", PERSON.ljust(16, b"\0"))
    chained = [*INITIAL[:6], INITIAL[6] ^ person[0], INITIAL[7] ^ person[1]]
    chained[0] ^= 0x01010000 ^ 16  # parameters: fanout 1, depth 1, no key, digest of 16 bytes
    begins = [*chained, *INITIAL[:4], INITIAL[4] ^ len(message), INITIAL[5], INITIAL[6] ^ MASK, INITIAL[7]]
    packed = struct.pack("<16Q", *begins) + message.ljust(128, b"\0")
    return torch.from_numpy(np.frombuffer(packed, dtype="<i8").copy()).to(device)


@cache
def _strips(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.from_numpy(table).to(device) for table in strips())  # type: ignore[return-value]


def strips() -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """Tables of the ziggurat (Marsaglia and Tsang 2000) per strip, the strip with the tail first: the bound on the
    23-bit integer below which a number is under the curve, the factor that turns the integer into a number, and the
    curve's height at the strip's end."""

    def curve(x: float) -> float:
        return math.exp(-0.5 * x * x)

    area = EDGE * curve(EDGE) + math.sqrt(math.pi / 2) * math.erfc(EDGE / math.sqrt(2))
    ends = [EDGE]
    while len(ends) < STRIPS - 1:
        ends.append(math.sqrt(-2 * math.log(area / ends[-1] + curve(ends[-1]))))
    ends.append(0.0)
    edge, *_ = ends
    wide = np.array([area / curve(edge), *ends[-2::-1]])
    inner = np.array([edge, *ends[:0:-1]])
    heights = np.array([1.0, *(curve(x) for x in ends[-2::-1])])
    return (inner / wide * 2**23).astype(np.int32), (wide / 2**23).astype(np.float32), heights.astype(np.float32)
