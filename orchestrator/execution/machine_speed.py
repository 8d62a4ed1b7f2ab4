"""How fast a core of this machine multiplies matrices. Measured once and stored in the cache folder, because torch
takes seconds to import."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
from importlib import metadata

from trainables.data.sources.fetching import cache_folder
from trainables.files import replacing
from trainables.lazy import torch


def gemm_rate() -> float:
    """Floating-point operations per second of one core."""
    file = cache_folder() / "machine-speed.json"
    machine = f"{platform.node()}, {os.cpu_count()} cores {platform.machine()}, torch {metadata.version('torch')}"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        rate = float(json.loads(file.read_text(encoding="utf-8"))[machine])
        if 0 < rate < math.inf:
            return rate
    rate = _measured()
    with contextlib.suppress(OSError):  # it is measured again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as written:
            written.write(json.dumps({machine: rate}).encode())
    return rate


def _measured() -> float:
    """Measure the rate, for a tenth of a second of CPU time."""
    x, w = torch.rand(1024, 65), torch.rand(65, 160)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.mm(x, w)
        count, began = 0, time.thread_time()
        while time.thread_time() - began < 0.1:
            torch.mm(x, w)
            count += 1
        return count * 2.0 * x.numel() * w.shape[1] / (time.thread_time() - began)
    finally:
        torch.set_num_threads(before)
