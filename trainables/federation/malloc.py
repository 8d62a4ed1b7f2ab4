"""Memory that a round has freed is kept for the next one.

The C library gives large blocks back to the system at once, to get them anew, page by page, a moment later. A host does
so hundreds of times a round, which can take as long as a third of its arithmetic.
"""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # what glibc calls them
LARGEST = 256 << 20  # bytes of a block that is kept
MOST = 512 << 20  # bytes kept at the end of the heap; what lies free between blocks in use stays anyway
LARGEST_THEN = 32 << 20  # what older libraries allow


def keep_freed_memory() -> None:
    """In this process, from now on. Nothing happens where the C library is none of GNU's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, MOST)
        if not mallopt(MMAP_THRESHOLD, LARGEST):
            mallopt(MMAP_THRESHOLD, LARGEST_THEN)
