"""How trials are grouped into packs, and how many federations a cluster holds. Of these choices only the kind of device
can change results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from orchestrator.study.settings.resources import ResourceSettings
from trainables.errors import UserError
from trainables.federation.federation_size import FederationSize
from trainables.federation.pack import PackGroup, pack_group
from trainables.federation.trial_spec import TrialSpec
from trainables.models.lanes import SHAPES
from trainables.models.network_settings import is_network

AUTO_LANES = {"cpu": 128, "cuda": 2048}
HOSTS_PER_FEDERATION = 4  # more hosts wait longer for one another; further cores run another federation
BUSY_ENOUGH = 0.75  # share of the cores: federations get fewer hosts if larger ones would use less than this share

Node = Mapping[str, float]
"""A node's resources, by Ray's names."""


@dataclass(frozen=True)
class Capacity:
    """The number and size of the federations that run on a cluster."""

    size: FederationSize
    federations: int
    """Federations that run at the same time, each with one pack."""
    lanes_per_pack: int
    placement: str = "pack"
    max_federations: int | None = None
    """The study's own limit."""
    prefers_gpus: bool = False
    """Whether the study would use GPUs, but there were none: it moves to GPUs that become available."""

    def federations_on(self, nodes: Sequence[Node]) -> int:
        count = federations_that_fit(nodes, self.size, self.placement)
        return count if self.max_federations is None else min(count, self.max_federations)

    def can_use(self, node: Node) -> bool:
        """Whether the node has room for a federation, or for one host if federations are spread over nodes."""
        size = replace(self.size, hosts=1) if self.placement == "spread" else self.size
        return federations_that_fit([node], size, "pack") > 0

    def gpu_federations_on(self, nodes: Sequence[Node]) -> int:
        """How many federations of one host with one GPU fit on these nodes."""
        return federations_that_fit(nodes, replace(self.size, hosts=1, gpus_per_host=1.0), self.placement)


def cluster_capacity(nodes: Sequence[Node], settings: ResourceSettings, clients: int) -> Capacity:
    """The federations that these nodes have room for. Each must fit on one node, unless its hosts are spread."""
    gpus = settings.gpus_per_host
    if gpus == "auto":
        gpus = 1.0 if any(min(node.get("GPU", 0), node.get("CPU", 0)) >= 1 for node in nodes) else 0.0
    if settings.hosts != "auto":
        size = FederationSize(min(settings.hosts, clients), 1.0, gpus)
    elif gpus > 0:
        size = FederationSize(1, 1.0, gpus)
    else:
        size = _largest_that_keeps_cores_busy(nodes, settings.placement, clients, _memory(settings))
    size = replace(size, memory_per_host=_memory(settings), accelerator=settings.accelerator)
    federations = federations_that_fit(nodes, size, settings.placement)
    if federations == 0:
        spread = settings.placement == "spread"
        place, missing = ("the cluster", "it does not have") if spread else ("one node", "none has")
        need = " and ".join(_amount(name, amount * size.hosts) for name, amount in size.host_bundle.items())
        part = f" ({size.gpus_per_host:g} of one device for each)" if 0 < size.gpus_per_host < 1 else ""
        raise UserError(f"resources: a federation of {size.hosts} hosts needs {need} on {place}{part}, which {missing}")
    limit = None if settings.federations == "auto" else settings.federations
    prefers_gpus = settings.gpus_per_host == "auto" and settings.hosts == "auto" and gpus == 0
    return Capacity(
        size,
        min(federations, limit or federations),
        lanes_per_pack(settings, size.device),
        settings.placement,
        limit,
        prefers_gpus,
    )


def lanes_per_pack(settings: ResourceSettings, device: str) -> int:
    return AUTO_LANES[device] if settings.lanes_per_pack == "auto" else settings.lanes_per_pack


def _amount(name: str, amount: float) -> str:
    if name == "memory":
        return f"{amount / 2**30:g} GiB of memory"
    model = name.removeprefix("accelerator_type:")
    return f"{amount:g} {name}" if model == name else f"an accelerator {model}"


def smallest_federation(settings: ResourceSettings) -> FederationSize:
    """The smallest federation that the study allows."""
    hosts = 1 if settings.hosts == "auto" else settings.hosts
    gpus = 0.0 if settings.gpus_per_host == "auto" else settings.gpus_per_host
    return FederationSize(hosts, 1.0, gpus, _memory(settings), settings.accelerator)


def federations_that_fit(nodes: Sequence[Node], size: FederationSize, placement: str) -> int:
    hosts = [_hosts_that_fit(node, size) for node in nodes]
    return sum(hosts) // size.hosts if placement == "spread" else sum(count // size.hosts for count in hosts)


def _memory(settings: ResourceSettings) -> int:
    return int(settings.memory_gib_per_host * 2**30)


def _largest_that_keeps_cores_busy(nodes: Sequence[Node], placement: str, clients: int, memory: int) -> FederationSize:
    sizes = [
        FederationSize(hosts, memory_per_host=memory) for hosts in range(min(HOSTS_PER_FEDERATION, clients), 0, -1)
    ]
    cores = sum(_hosts_that_fit(node, sizes[-1]) for node in nodes)
    busy = ((size, size.hosts * federations_that_fit(nodes, size, placement)) for size in sizes)
    return next((size for size, used in busy if 0 < BUSY_ENOUGH * cores <= used), sizes[-1])


def _hosts_that_fit(node: Node, size: FederationSize) -> int:
    return min(_times(node.get(name, 0.0), amount, name) for name, amount in size.host_bundle.items())


def _times(available: float, amount: float, name: str) -> int:
    """How many hosts with this amount of a resource fit. A fraction of a GPU must be on one device: on two GPUs, 0.4 of
    a GPU fits four times, not five."""
    if name == "GPU" and amount < 1:
        return int(available + 1e-9) * int(1 / amount + 1e-9) + int(available % 1 / amount + 1e-9)
    return int(available / amount + 1e-9)


def passes(trial: TrialSpec, device: str, seeds: int = 1) -> float:
    """Passes over all rows per round, in a pack with this number of seeds. A GPU takes about as long for a network's
    gradients of few rows as of many, and for a head's gradients of few clients as of all."""
    network = is_network(trial.problem.model)
    found = float(trial.hyperparameters.get("local_steps", 1))
    if device == "cpu" or not network:
        found *= float(trial.hyperparameters.get("sampling_rate", 1))
    if device == "cpu" or network:
        found *= taking_part(trial, seeds)
    return found


def taking_part(trial: TrialSpec, seeds: int) -> float:
    """The expected share of the clients that take part in a round for one of the seeds: each draws its own clients, and
    a client is computed for all lanes of a pack."""
    return float(1 - (1 - float(trial.hyperparameters.get("participation", 1))) ** seeds)


def work(pack: Sequence[TrialSpec], rows: int, device: str) -> float:
    """Estimated cost: the number of per-example gradients, over all lanes and rounds. Lanes are computed in whole
    blocks."""
    block = SHAPES[device].lanes
    seeds = len({trial.seed for trial in pack})
    return math.ceil(len(pack) / block) * block * pack[0].last_round * passes(pack[0], device, seeds) * rows


MemoryLimits = Mapping[PackGroup, int]
"""Lanes that fit into memory, by pack group."""


def make_packs(
    trials: Iterable[TrialSpec], capacity: Capacity, limits: MemoryLimits = MappingProxyType({})
) -> list[list[TrialSpec]]:
    """Packs of about equal size. There are enough to keep all federations busy, unless trials are few."""
    groups: dict[PackGroup, list[TrialSpec]] = {}
    for trial in trials:
        groups.setdefault(pack_group(trial), []).append(trial)
    packs = []
    block = SHAPES[capacity.size.device].lanes
    for group, members in groups.items():
        most = min(capacity.lanes_per_pack, limits.get(group, capacity.lanes_per_pack))
        count = math.ceil(len(members) / most)
        if count < capacity.federations:  # split further, but not below a block of lanes
            count = min(capacity.federations, max(count, len(members) // block))
        length = math.ceil(len(members) / count)
        if most >= block:
            length = min(most, math.ceil(length / block) * block)
        packs += _chunks(members, length)
    return packs


def split(pack: list[TrialSpec], parts: int, block: int) -> list[list[TrialSpec]]:
    """Split a pack into at most this many parts. All but the last consist of whole blocks of lanes."""
    return _chunks(pack, math.ceil(math.ceil(len(pack) / parts) / block) * block)


def _chunks(members: list[TrialSpec], length: int) -> list[list[TrialSpec]]:
    return [members[start : start + length] for start in range(0, len(members), length)]
