"""What the nodes of the cluster have, what of it is free, and who has the rest."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from orchestrator.running import ray_private
from trainables.pack_desk import PackDesk

STRATEGY = {"pack": "STRICT_PACK", "spread": "SPREAD"}
"""How Ray calls where the hosts of a federation go."""


def gone_nodes() -> set[str]:
    """Those that were there once."""
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}


def node_resources() -> list[dict[str, float]]:
    """The resources of every node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def free_resources() -> list[dict[str, float]]:
    """What of them nobody holds right now."""
    return list(ray_private.available_resources_per_node().values())


def holders() -> str:
    """Who else has actors on the cluster, as a part of a sentence."""
    me = ray.get_runtime_context().get_job_id()
    counts = Counter(
        actor["JobID"] for actor in ray_private.actors().values() if actor["State"] == "ALIVE" and actor["JobID"] != me
    )
    if not counts:
        return "nobody says by whom"
    commands = {job["JobID"]: job.get("Entrypoint") or "a driver" for job in ray_private.jobs()}
    return "; ".join(f"{count} actors of {commands.get(job, 'a driver')}" for job, count in counts.most_common())


def slots_start() -> bool:
    """Whether this driver has been given room, and processes of its own begin there."""
    me = ray.get_runtime_context().get_job_id()
    mine = [actor for actor in ray_private.actors().values() if actor["JobID"] == me and actor["State"] != "DEAD"]
    return any(actor["ActorClassName"] != PackDesk.__name__ for actor in mine)


@contextlib.contextmanager
def asked_for(bundles: Sequence[dict[str, float]], strategy: str) -> Iterator[None]:
    """While the block runs, the cluster knows that this is wanted together: what an autoscaler acts upon."""
    group = placement_group(list(bundles), strategy=strategy)
    try:
        yield
    finally:
        remove_placement_group(group)
