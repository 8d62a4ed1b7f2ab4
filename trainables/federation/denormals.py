"""Denormal numbers are flushed to zero while rounds are computed.

Most x86 processors take about a hundred times as long to multiply a denormal number. Next to weights, sums and noise,
denormals are negligible.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Depth(threading.local):
    """The number of `flush_denormals` blocks that a thread is in."""

    now = 0


_DEPTH = _Depth()


@contextlib.contextmanager
def flush_denormals() -> Iterator[None]:
    """Flush denormals in this thread while the block runs, and not after it. Blocks may be nested."""
    _DEPTH.now += 1
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        _DEPTH.now -= 1
        if not _DEPTH.now:
            torch.set_flush_denormal(False)
