"""How much memory there is, and how many lanes of a large model fit into it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.execution.packing import Capacity
from orchestrator.study.settings.resources import ResourceSettings

CGROUP = Path("/sys/fs/cgroup/memory.max")
LANE_BYTES = 8 * 6  # for every weight of a lane, in every host and in the server: weights, releases, state, work
LANES_SHARE = 0.5  # of a node's memory; the rest is for data and processes


def machine_bytes() -> int:
    """Of the machine, or of the container where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(CGROUP.read_text()))
    except (OSError, ValueError):  # no such file, or `max`
        return physical


def lanes_bytes(size: Capacity, dimension: int) -> int:
    """What all lanes of all federations take."""
    return size.federations * size.size.hosts * size.lanes_per_pack * dimension * LANE_BYTES


def within_memory(
    size: Capacity, settings: ResourceSettings, dimension: int, nodes: Sequence[dict[str, float]] = ()
) -> Capacity:
    """With fewer lanes where a model is so large that they would not fit, unless the study says how many. A GPU counts
    for itself. `nodes`: with the memory that Ray sees there; without, it is this machine's."""
    if settings.lanes_per_pack != "auto" or size.size.device != "cpu":
        return size
    least = min((node["memory"] for node in nodes if node.get("memory")), default=machine_bytes())
    beside = max(1, size.federations // max(1, len(nodes)))
    fitting = int(LANES_SHARE * least / (beside * size.size.hosts * dimension * LANE_BYTES))
    return replace(size, lanes_per_pack=max(1, min(size.lanes_per_pack, fitting)))
