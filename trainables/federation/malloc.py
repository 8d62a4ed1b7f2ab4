"""Keeps freed memory for the next round.

The C library returns large blocks to the system at once and requests them again, page by page, a moment later. A host
does so hundreds of times per round, which can take a third as long as its arithmetic.
"""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's numbers
LARGEST = 256 << 20  # bytes: larger blocks are still returned to the system at once
MOST = 512 << 20  # bytes kept free at the end of the heap; free memory between blocks in use is always kept
LARGEST_THEN = 32 << 20  # `LARGEST` for older versions of glibc, which refuse more


def keep_freed_memory() -> None:
    """Change malloc's thresholds in this process. Does nothing if the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, MOST)
        if not mallopt(MMAP_THRESHOLD, LARGEST):
            mallopt(MMAP_THRESHOLD, LARGEST_THEN)
