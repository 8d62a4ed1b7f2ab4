"""How trials are put together into packs, and how much of the cluster a federation takes. Never changes a result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from orchestrator.study.settings.resources import ResourceSettings
from trainables.errors import UserError
from trainables.federation.pack import PackGroup, pack_group
from trainables.federation.trial_spec import TrialSpec
from trainables.models.lanes import SHAPES
from trainables.ray_actors.federation import FederationSize

AUTO_LANES = {"cpu": 128, "cuda": 2048}
HOSTS_PER_FEDERATION = 4  # more hosts wait longer for one another; cores beyond that run another federation
BUSY_ENOUGH = 0.75  # of the cores: for less idling, federations get smaller


@dataclass(frozen=True)
class Capacity:
    """What the cluster can hold of this study."""

    size: FederationSize
    federations: int
    """That work side by side, or can right now: as many packs are in flight."""
    lanes_per_pack: int
    placement: str = "pack"
    most: int | None = None
    """Federations that the study is to have at most, if that was said."""
    waits_for_gpus: bool = False
    """On CPUs because there were no GPUs, not because the study says so."""

    def room(self, nodes: Sequence[dict[str, float]]) -> int:
        """How many federations of this size these nodes hold."""
        found = room(nodes, self.size, self.placement)
        return found if self.most is None else min(found, self.most)

    def on_gpus(self, nodes: Sequence[dict[str, float]]) -> int:
        """How many federations these nodes would hold if each had a GPU."""
        return room(nodes, replace(self.size, hosts=1, gpus_per_host=1.0), self.placement)


def capacity(nodes: Sequence[dict[str, float]], settings: ResourceSettings, clients: int) -> Capacity:
    """`nodes`: the resources of every node. A federation fits into a node or not at all, whatever the cluster's sum,
    unless its hosts are to be spread."""
    gpus = settings.gpus_per_host
    if gpus == "auto":
        gpus = 1.0 if any(min(node.get("GPU", 0), node.get("CPU", 0)) >= 1 for node in nodes) else 0.0
    if settings.hosts != "auto":
        size = FederationSize(min(settings.hosts, clients), 1.0, gpus)
    elif gpus > 0:
        size = FederationSize(1, 1.0, gpus)
    else:
        size = _fitting(nodes, settings.placement, clients, _memory(settings))
    size = replace(size, memory_per_host=_memory(settings), accelerator=settings.accelerator)
    federations = room(nodes, size, settings.placement)
    if federations == 0:
        need = " and ".join(_shown(name, amount * size.hosts) for name, amount in size.host_bundle.items())
        part = f" ({size.gpus_per_host:g} of one device for each)" if 0 < size.gpus_per_host < 1 else ""
        raise UserError(
            f"resources: a federation of {size.hosts} hosts needs {need} on "
            f"{'the cluster' if settings.placement == 'spread' else 'one node'}{part}, which none has"
        )
    lanes = AUTO_LANES[size.device] if settings.lanes_per_pack == "auto" else settings.lanes_per_pack
    most = None if settings.federations == "auto" else settings.federations
    without_gpus = settings.gpus_per_host == "auto" and settings.hosts == "auto" and gpus == 0
    return Capacity(size, min(federations, most or federations), lanes, settings.placement, most, without_gpus)


def _shown(name: str, amount: float) -> str:
    if name == "memory":
        return f"{amount / 2**30:g} GiB of memory"
    kind = name.removeprefix("accelerator_type:")
    return f"{amount:g} {name}" if kind == name else f"an accelerator {kind}"


def smallest(settings: ResourceSettings) -> FederationSize:
    """The smallest federation that the study may have, on whatever nodes."""
    hosts = 1 if settings.hosts == "auto" else settings.hosts
    gpus = 0.0 if settings.gpus_per_host == "auto" else settings.gpus_per_host
    return FederationSize(hosts, 1.0, gpus, _memory(settings), settings.accelerator)


def room(nodes: Sequence[dict[str, float]], size: FederationSize, placement: str) -> int:
    """How many federations the nodes hold side by side."""
    slots = [_slots(node, size) for node in nodes]
    return sum(slots) // size.hosts if placement == "spread" else sum(slot // size.hosts for slot in slots)


def _memory(settings: ResourceSettings) -> int:
    return int(settings.memory_gib_per_host * 2**30)


def _fitting(nodes: Sequence[dict[str, float]], placement: str, clients: int, memory: int) -> FederationSize:
    """The largest federation that leaves few cores idle, on nodes that may be of many sizes."""
    sizes = [
        FederationSize(hosts, memory_per_host=memory) for hosts in range(min(HOSTS_PER_FEDERATION, clients), 0, -1)
    ]
    cores = sum(_slots(node, sizes[-1]) for node in nodes)
    return next(
        (size for size in sizes if 0 < BUSY_ENOUGH * cores <= size.hosts * room(nodes, size, placement)), sizes[-1]
    )


def _slots(node: dict[str, float], size: FederationSize) -> int:
    """How many hosts a node has room for."""
    return min(_parts(node.get(name, 0.0), amount, name) for name, amount in size.host_bundle.items())


def _parts(there: float, amount: float, name: str) -> int:
    """How often an amount is there. A part of a GPU lies on one device: two devices hold 0.4 four times, not five."""
    if name == "GPU" and amount < 1:
        return int(there + 1e-9) * int(1 / amount + 1e-9) + int(there % 1 / amount + 1e-9)
    return int(there / amount + 1e-9)


def passes(trial: TrialSpec) -> float:
    """How often a round goes over all rows: once, or as often as its local steps and samples have it."""
    hypers = trial.hyperparameters
    return math.prod(float(hypers.get(name, 1)) for name in ("local_steps", "sampling_rate", "participation"))


def work(pack: Sequence[TrialSpec], rows: int, device: str) -> float:
    """About how much there is to compute, in rows that go through a lane. Lanes are computed in whole blocks."""
    block = SHAPES[device].lanes
    return math.ceil(len(pack) / block) * block * pack[0].last_round * passes(pack[0]) * rows


Limits = Mapping[PackGroup, int]
"""Lanes that a GPU has memory for, by the groups of trials that can share a pack."""


def make_packs(
    trials: Iterable[TrialSpec], size: Capacity, limits: Limits = MappingProxyType({})
) -> list[list[TrialSpec]]:
    """Trials that can share a pack, cut into packs of about equal size, as many as keep all federations busy."""
    groups: dict[PackGroup, list[TrialSpec]] = {}
    for trial in trials:
        groups.setdefault(pack_group(trial), []).append(trial)
    packs = []
    block = SHAPES[size.size.device].lanes
    for group, members in groups.items():
        most = min(size.lanes_per_pack, limits.get(group, size.lanes_per_pack))
        count = math.ceil(len(members) / most)
        if count < size.federations:  # split further, but not below a block of lanes
            count = min(size.federations, max(count, len(members) // block))
        length = math.ceil(len(members) / count)
        if most >= block:
            length = min(most, math.ceil(length / block) * block)
        packs += _cut(members, length)
    return packs


def shares(pack: list[TrialSpec], parts: int, block: int) -> list[list[TrialSpec]]:
    """A pack in so many parts or fewer, of whole blocks of lanes."""
    return _cut(pack, math.ceil(math.ceil(len(pack) / parts) / block) * block)


def _cut(members: list[TrialSpec], length: int) -> list[list[TrialSpec]]:
    return [members[start : start + length] for start in range(0, len(members), length)]
