"""The nodes of the cluster, their resources, and which of these are free or used by other jobs."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from orchestrator.execution.cluster import ray_internals
from trainables.ray_actors.desk import PackDesk

PLACEMENT = {"pack": "STRICT_PACK", "spread": "SPREAD"}
"""Ray's names for the placement of a federation's hosts."""


@dataclass(frozen=True)
class ClusterNodes:
    """The nodes of a cluster, by Ray's ids."""

    alive: dict[str, dict[str, float]]
    """Their resources."""
    names: dict[str, str] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    """Nodes that have left the cluster."""
    leaving: set[str] = field(default_factory=set)
    """Nodes that are about to leave: they were asked to drain, for example because a cloud takes them back."""


def current() -> ClusterNodes:
    nodes = ray.nodes()
    return ClusterNodes(
        {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]},
        {node["NodeID"]: node["NodeName"] or node["NodeManagerAddress"] for node in nodes},
        {node["NodeID"] for node in nodes if not node["Alive"]},
        ray_internals.draining_nodes(),
    )


def node_resources() -> list[dict[str, float]]:
    return list(current().alive.values())


def free_resources(without: Collection[str] = ()) -> list[dict[str, float]]:
    """The free resources of every node. `without`: ids of nodes to leave out."""
    free = ray_internals.available_resources_per_node()
    return [resources for node, resources in free.items() if node not in without]


def other_jobs() -> str:
    """What other jobs have reserved, as part of a sentence."""
    own_job = ray.get_runtime_context().get_job_id()
    reserved: dict[str, Counter[str]] = defaultdict(Counter)
    for actor in ray_internals.actors().values():
        if actor["State"] == "ALIVE":
            reserved[actor["JobID"]]["actors"] += 1
    for group_id, group in placement_group_table().items():
        if group["state"] == "CREATED":
            for bundle in group["bundles"].values():
                reserved[group_id[-len(own_job) :]].update(bundle)  # a group's id ends with its job's
    reserved.pop(own_job, None)
    if not reserved:
        return "and Ray lists no other job"
    commands = {job["JobID"]: job.get("Entrypoint") or "a driver" for job in ray_internals.jobs()}
    return "; ".join(
        f"{_amounts(amounts)} held by {commands.get(job, 'a driver')}"
        for job, amounts in sorted(reserved.items(), key=lambda item: -item[1]["CPU"])
    )


def _amounts(reserved: Counter[str]) -> str:
    parts = [f"{reserved[name]:g} {name}" for name in ("CPU", "GPU") if reserved[name]]
    return " and ".join([*parts, f"{reserved['actors']} actor{'s' if reserved['actors'] != 1 else ''}"])


def has_slots() -> bool:
    """Whether this driver has slots or federations, starting or running."""
    own_job = ray.get_runtime_context().get_job_id()
    own = [a for a in ray_internals.actors().values() if a["JobID"] == own_job and a["State"] != "DEAD"]
    return any(actor["ActorClassName"] != PackDesk.__name__ for actor in own)


@contextlib.contextmanager
def requested(bundles: Sequence[dict[str, float]], strategy: str) -> Iterator[None]:
    """While the block runs, an autoscaler sees that these resources are needed."""
    group = placement_group(list(bundles), strategy=strategy)
    try:
        yield
    finally:
        remove_placement_group(group)


def reserved_for_children() -> dict[str, float] | None:
    """If this process runs in a placement group, for example as a Tune trial: the resources of the group without those
    of the process itself. Actors that the process starts can use no others. None outside of a placement group."""
    group = ray.util.get_current_placement_group() if ray.is_initialized() else None
    if group is None:
        return None
    resources: dict[str, float] = {}
    for bundle in group.bundle_specs[1:]:  # the first belongs to the process
        for name, amount in bundle.items():
            resources[name] = resources.get(name, 0.0) + amount
    return resources
