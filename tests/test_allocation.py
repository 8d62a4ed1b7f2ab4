"""A process that keeps freed memory does not request it again, page by page."""

import ctypes
import subprocess
import sys

import pytest

BLOCK = 20 << 20
BLOCKS = 5  # together more than the C library keeps by default
TIMES = 10
COUNTED = f"""
import resource, sys
from trainables.federation.malloc import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({TIMES}):
    blocks = [bytearray({BLOCK}) for _ in range({BLOCKS})]
    for block in blocks:
        block[::4096] = bytes(len(block[::4096]))
    del block, blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    found = subprocess.run([sys.executable, "-c", COUNTED, how], capture_output=True, text=True, check=True)
    return int(found.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_kept():
    assert faults("kept") < faults("given back") / (TIMES / 2)
