"""Numbers too small to have all their digits.

Most x86 processors take a hundred times as long for a product with one. None of them can matter here: beside weights,
sums and noise they are nothing. So while rounds are computed, the processor takes them for zero.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Depth(threading.local):
    now = 0


_DEPTH = _Depth()


@contextlib.contextmanager
def taken_for_zero() -> Iterator[None]:
    """In this thread, until the block ends: a caller's own arithmetic is left as it was."""
    _DEPTH.now += 1
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        _DEPTH.now -= 1
        if not _DEPTH.now:
            torch.set_flush_denormal(False)
