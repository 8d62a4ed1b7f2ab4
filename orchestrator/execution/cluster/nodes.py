"""What the nodes of the cluster have, what of it is free, and who has the rest."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from orchestrator.execution.cluster import ray_internals
from trainables.ray_actors.desk import PackDesk

STRATEGY = {"pack": "STRICT_PACK", "spread": "SPREAD"}
"""How Ray calls where the hosts of a federation go."""


def present_and_gone() -> tuple[list[dict[str, float]], set[str]]:
    """The resources of the nodes that are alive, and the names of those that were there once."""
    nodes = ray.nodes()
    there = [node["Resources"] for node in nodes if node["Alive"]]
    return there, {node["NodeID"] for node in nodes if not node["Alive"]}


def node_resources() -> list[dict[str, float]]:
    """The resources of every node that is alive."""
    return present_and_gone()[0]


def free_resources() -> list[dict[str, float]]:
    """What of them nobody holds right now."""
    return list(ray_internals.available_resources_per_node().values())


def holders() -> str:
    """Who else is on the cluster and what they have reserved there, as a part of a sentence."""
    me = ray.get_runtime_context().get_job_id()
    held: dict[str, Counter[str]] = defaultdict(Counter)
    for actor in ray_internals.actors().values():
        if actor["State"] == "ALIVE":
            held[actor["JobID"]]["actors"] += 1
    for group, found in placement_group_table().items():
        if found["state"] == "CREATED":
            for bundle in found["bundles"].values():
                held[group[-len(me) :]].update(bundle)  # whose job is the end of its name
    held.pop(me, None)
    if not held:
        return "nobody says by whom"
    commands = {job["JobID"]: job.get("Entrypoint") or "a driver" for job in ray_internals.jobs()}
    said = (
        f"{_amounts(amounts)} held by {commands.get(job, 'a driver')!r}"
        for job, amounts in sorted(held.items(), key=lambda found: -found[1]["CPU"])
    )
    return "; ".join(said)


def _amounts(held: Counter[str]) -> str:
    parts = [f"{held[name]:g} {name}" for name in ("CPU", "GPU") if held[name]]
    return " and ".join([*parts, f"{held['actors']} actor{'s' if held['actors'] != 1 else ''}"])


def slots_start() -> bool:
    """Whether this driver has been given room, and processes of its own begin there."""
    me = ray.get_runtime_context().get_job_id()
    mine = [actor for actor in ray_internals.actors().values() if actor["JobID"] == me and actor["State"] != "DEAD"]
    return any(actor["ActorClassName"] != PackDesk.__name__ for actor in mine)


@contextlib.contextmanager
def asked_for(bundles: Sequence[dict[str, float]], strategy: str) -> Iterator[None]:
    """While the block runs, the cluster knows that this is wanted together: what an autoscaler acts upon."""
    group = placement_group(list(bundles), strategy=strategy)
    try:
        yield
    finally:
        remove_placement_group(group)
