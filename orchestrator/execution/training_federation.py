"""Where one training run is computed: in this process, or on Ray. The result is the same.

Ray takes seconds to start, so a run that needs no cluster does not import it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from orchestrator.execution.packing import passes
from trainables.errors import UserError, in_range
from trainables.federation.federation_size import FederationSize
from trainables.federation.lane_result import LaneResult
from trainables.federation.problem import Problem, ProblemData
from trainables.federation.trial_spec import TrialSpec
from trainables.lazy import torch
from trainables.models import operations

SMALL = 1e11  # floating-point operations, which take about as long as the start of Ray


class Federation(Protocol):
    def advance(self, until: int) -> list[LaneResult]: ...

    def final_weights(self) -> np.ndarray | None: ...


@contextmanager
def open_federation(trial: TrialSpec, problem: Problem, address: str | None, hosts: int | None) -> Iterator[Federation]:
    """A federation that is ready to run the trial. `hosts`: number of client hosts; default: chosen by the size of the
    run and the resources. With GPUs there is always one host."""
    if address is None and (hosts == 1 or (hosts is None and is_small(trial, problem))):
        with _in_process(trial, problem) as federation:
            yield federation
    else:
        with _on_ray(trial, problem, address, hosts) as federation:
            yield federation


def is_small(trial: TrialSpec, problem: Problem) -> bool:
    """Whether the run would take less time than the start of Ray."""
    return operations(problem.model) * sum(problem.partition.sizes) * trial.rounds * passes(trial, "cpu") < SMALL


@contextmanager
def _in_process(trial: TrialSpec, problem: Problem) -> Iterator[Federation]:
    from trainables.federation.hosts import Hosts  # imports torch, as do the next lines
    from trainables.federation.server import Server

    device, threads = "cuda" if torch.cuda.is_available() else "cpu", torch.get_num_threads()
    try:
        server = Server(Hosts(1, device), device)
        server.open([trial], ProblemData.of(problem))
        yield server
    finally:
        torch.set_num_threads(threads)  # a federation on the CPU sets one thread


@contextmanager
def _on_ray(trial: TrialSpec, problem: Problem, address: str | None, hosts: int | None) -> Iterator[Federation]:
    from orchestrator.execution.cluster.connect import connected
    from trainables.ray_actors.federation import RayFederation
    from trainables.ray_actors.object_store import ObjectStoreProblems

    with connected(address):
        federation = RayFederation(_size(trial, hosts))
        try:
            federation.open([trial], ObjectStoreProblems().data(problem))
            yield federation
        finally:
            federation.close()


def _size(trial: TrialSpec, hosts: int | None) -> FederationSize:
    import ray

    from orchestrator.execution.cluster.nodes import reserved_for_children

    resources = reserved_for_children()
    if resources is None:
        resources = ray.cluster_resources()
    elif resources.get("CPU", 0) < 1:
        raise UserError(
            "this training runs inside a Tune trial, or another task with a placement group, that reserves no CPU for "
            "client hosts, and would wait forever; reserve some: tune.with_resources(trainable, "
            "tune.PlacementGroupFactory([{'CPU': 1}, {'CPU': 1}, {'CPU': 1}])) reserves two"
        )
    clients = trial.problem.partition.clients
    if resources.get("GPU", 0) >= 1:
        return FederationSize(hosts=1, gpus_per_host=1)
    cpus = max(1, int(resources.get("CPU", 1)))
    hosts = cpus if hosts is None else hosts
    in_range(1, cpus, hosts=hosts)
    return FederationSize(hosts=min(hosts, clients))
