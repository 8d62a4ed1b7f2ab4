"""How many lanes of a large model fit into the memory of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.execution.packing import Capacity
from orchestrator.study.settings.resources import ResourceSettings
from trainables.federation.machine_memory import machine_bytes

LANE_BYTES = 8 * 6  # for every weight, lane and host: weights, releases, state and temporaries, also the server's
LANES_SHARE = 0.5  # of a node's memory; data and processes need the rest


def lanes_bytes(capacity: Capacity, dimension: int) -> int:
    """The memory of all lanes of all federations. `dimension`: the number of weights of the model."""
    return capacity.federations * capacity.size.hosts * capacity.lanes_per_pack * dimension * LANE_BYTES


def within_memory(
    capacity: Capacity, settings: ResourceSettings, dimension: int, nodes: Sequence[dict[str, float]] = ()
) -> Capacity:
    """The capacity, with fewer lanes per pack if the lanes of a large model would not fit into memory. Unchanged if the
    study sets `lanes_per_pack`, and on GPUs, where federations check the memory themselves. `dimension`: the number of
    weights of the model. `nodes`: the resources of a cluster's nodes; default: this machine."""
    if settings.lanes_per_pack != "auto" or capacity.size.device != "cpu":
        return capacity
    least = min((node["memory"] for node in nodes if node.get("memory")), default=machine_bytes())
    per_node = max(1, capacity.federations // max(1, len(nodes)))
    fitting = int(LANES_SHARE * least / (per_node * capacity.size.hosts * dimension * LANE_BYTES))
    return replace(capacity, lanes_per_pack=max(1, min(capacity.lanes_per_pack, fitting)))
