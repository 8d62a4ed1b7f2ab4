"""The memory of a machine."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup/memory.max")


def machine_bytes() -> int:
    """Memory of the machine, or of the container if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(CGROUP.read_text()))
    except (OSError, ValueError):  # no such file, or its content is `max`
        return physical
