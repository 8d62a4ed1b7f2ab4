"""A federation: one server actor and its client hosts, long-lived, reused by pack after pack.

Whoever starts one has no use for torch, which takes seconds to import: the actors' own processes do that.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainables.federation.lane_result import LaneResult, Progress
from trainables.federation.malloc import keep_freed_memory
from trainables.federation.trial_spec import TrialSpec

if TYPE_CHECKING:
    import torch

    from trainables.federation.client_host import ClientStates, HostReply, Sent
    from trainables.federation.pack import ClientWork
    from trainables.federation.problem import Shipment
    from trainables.models.kernels import Kernel

HOST_RESTARTS = 8  # how often a host may die before its federation is given up, and the pack with it begun elsewhere
ROUND_RETRIES = 2  # how often a host that dies in a round is asked again: whoever dies three times dies for a reason


START_PATIENCE_S = 240.0  # for a process to be there: one that is killed while it starts may be waited for without end
PATIENCE_S = 900.0  # for a host's first answer, before which it loads its rows and may be started again
SLOWEST_TIMES = 20.0  # whoever takes so many times as long as the slowest round so far hangs
SMALL_BYTES = 65_536  # below what Ray sends within a call
LEAST_PATIENCE_S = 120.0  # but a host that died is started again meanwhile


class HungError(RuntimeError):
    """An actor is there and does not answer."""


@dataclass(frozen=True)
class FederationSize:
    """How much of the cluster a federation takes. Never changes a result."""

    hosts: int = 1
    cpus_per_host: float = 1.0
    gpus_per_host: float = 0.0
    memory_per_host: int = 0
    """Bytes that Ray is to set aside."""
    accelerator: str = ""
    """The kind of GPU, as Ray calls it."""

    @property
    def device(self) -> str:
        return "cuda" if self.gpus_per_host > 0 else "cpu"

    @property
    def one_process(self) -> bool:
        """A GPU's only host lives in the server's process: weights and releases never leave the device."""
        return self.gpus_per_host > 0 and self.hosts == 1

    @property
    def server_gpus(self) -> float:
        """The server works beside its first host: a small part of that host's GPU is set down to it."""
        return round(self.gpus_per_host * 0.1, 4)

    @property
    def host_bundle(self) -> dict[str, float]:
        bundle = {
            "CPU": self.cpus_per_host,
            "GPU": self.gpus_per_host,
            "memory": self.memory_per_host,
            f"accelerator_type:{self.accelerator}": 0.001 if self.accelerator else 0.0,  # a node has 1 of its kind
        }
        return {name: amount for name, amount in bundle.items() if amount}

    @property
    def bundles(self) -> list[dict[str, float]]:
        return [self.host_bundle] * self.hosts


class HostActor:
    """A client host in a process of its own. What goes over the wire is plain arrays."""

    def __init__(self, index: int, device: str, kernel: Kernel) -> None:
        from trainables.federation.client_host import ClientHost
        from trainables.models import kernels

        keep_freed_memory()
        kernels.choose(kernel, device)
        self._host = ClientHost(index, device)
        self._work: tuple[str, ClientWork] | None = None

    def where(self) -> str:
        return f"node {ray.util.get_node_ip_address()}, process {os.getpid()}"

    def prepare(self, work: Sequence[Any]) -> np.ndarray:
        return _array(self._host.prepare(self._fetched(work)))

    def _fetched(self, work: Sequence[Any]) -> ClientWork:
        """What a reference in a list, which Ray leaves alone, refers to: fetched once for all rounds of a pack, and
        again by a host that was started again."""
        (reference,) = work
        if self._work is None or self._work[0] != reference.hex():
            self._work = (reference.hex(), ray.get(reference))
        return self._work[1]

    def round(
        self, work: Sequence[Any], t: int, sent: dict[str, np.ndarray], diagnose: bool
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        import torch

        # a copy: what comes out of the object store cannot be written to, which torch warns of
        theta = {name: torch.from_numpy(v.copy()) for name, v in sent.items()}
        reply = self._host.round(self._fetched(work), t, theta, diagnose)
        seen = reply.diagnostics
        return _array(reply.total), tuple(_array(part) for part in vars(seen).values()) if seen else None

    def states(self) -> ClientStates | None:
        return self._host.states()

    def restore(self, work: ClientWork, states: ClientStates) -> None:
        self._host.restore(work, states)


def _array(values: torch.Tensor) -> np.ndarray:
    return values.cpu().numpy()


class HostActors:
    """The client hosts as seen from the server actor: one message out and one back per host and round."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.count = len(handles)
        self._handles = list(handles)
        self._work: tuple[ClientWork, Any] | None = None
        self._slowest = 0.0
        self._where: list[Any] = []

    def _answers(self, calls: list[Any]) -> list[Any]:
        """What the hosts answer, one each. A host that hangs is found by the pace of the rounds before."""
        if not self._where:
            self._where = [host.where.remote() for host in self._handles]
        patience = max(LEAST_PATIENCE_S, SLOWEST_TIMES * self._slowest) if self._slowest else PATIENCE_S
        began = time.monotonic()
        _, late = ray.wait(calls, num_returns=len(calls), timeout=patience)
        if late:
            raise HungError(f"{self._named(calls.index(late[0]))} has not answered for {patience:.0f} s")
        replies = ray.get(calls)
        self._slowest = max(self._slowest, time.monotonic() - began)
        return replies

    def _named(self, index: int) -> str:
        try:
            return f"client host {index} ({ray.get(self._where[index], timeout=0)})"
        except ray.exceptions.RayError:
            return f"client host {index}"

    def prepare(self, work: ClientWork) -> list[torch.Tensor]:
        import torch

        replies = self._answers([host.prepare.remote(self._sent(work)) for host in self._busy(work)])
        return [torch.from_numpy(reply.copy()) for reply in replies]

    def round(self, work: ClientWork, t: int, sent: Sent, diagnose: bool) -> list[HostReply]:
        import torch

        from trainables.federation.client_host import HostDiagnostics, HostReply

        arrays = {name: _array(value) for name, value in sent.items()}
        # what is large goes into the object store, once for all hosts; what is small, into the calls themselves
        large = sum(array.nbytes for array in arrays.values()) > SMALL_BYTES
        message = ray.put(arrays) if large else arrays
        replies = self._answers(
            [host.round.remote(self._sent(work), t, message, diagnose) for host in self._busy(work)]
        )
        return [
            HostReply(
                torch.from_numpy(total.copy()),
                HostDiagnostics(*(torch.from_numpy(part.copy()) for part in seen)) if seen else None,
            )
            for total, seen in replies
        ]

    def _busy(self, work: ClientWork) -> list[Any]:
        return self._handles[: len(work.assignment)]

    def _sent(self, work: ClientWork) -> Any:
        """A pack's work goes out once, not every round."""
        if self._work is None or self._work[0].shipment.key != work.shipment.key:
            self._slowest = 0.0  # rows of other data are loaded first, and say nothing about the pace
        if self._work is None or self._work[0] is not work:
            self._work = (work, [ray.put(work)])
        return self._work[1]

    def states(self) -> list[ClientStates | None]:
        return self._answers([host.states.remote() for host in self._handles])

    def restore(self, work: ClientWork, states: ClientStates) -> None:
        self._answers(
            [
                host.restore.remote(work, states.of(clients))
                for host, clients in zip(self._handles, work.assignment, strict=False)
            ]
        )


class ServerActor:
    """The server in a process of its own."""

    def __init__(self, hosts: Sequence[Any], device: str, kernel: Kernel) -> None:
        """No `hosts`: the only one is in this process, too."""
        from trainables.federation.server import HostsHere, Server

        keep_freed_memory()
        self._server = Server(HostActors(hosts) if hosts else HostsHere(1, device), device, kernel)

    def lanes_that_fit(self, trials: Sequence[TrialSpec], shipment: Shipment, share: float) -> int | None:
        return self._server.lanes_that_fit(trials, shipment, share)

    def open(self, trials: Sequence[TrialSpec], shipment: Shipment, snapshot: bytes | None) -> None:
        self._server.open(trials, shipment, snapshot)

    def advance(self, until: int) -> list[LaneResult]:
        return self._server.advance(until)

    def progress(self, until: int) -> Progress:
        return self._server.progress(until)

    def pickled_results(self) -> bytes:
        return self._server.pickled_results()

    def snapshot(self) -> bytes:
        return self._server.snapshot()

    def final_weights(self) -> np.ndarray | None:
        return self._server.final_weights()


class Federation:
    """Starts the actors and speaks with the server. `close` ends them all."""

    def __init__(
        self,
        size: FederationSize,
        group: PlacementGroup | None = None,
        kernel: Kernel | None = None,
        name: str = "fedsweep",
    ) -> None:
        """`kernel`: which one all hosts use; if not said, the one that this process does. `name`: what Ray's own lists
        call the actors by."""
        self._name = f"{name} {secrets.token_hex(3)}"  # one that died may still be in the list
        if kernel is None:
            from trainables.models import kernels

            kernel = kernels.chosen(size.device)
        self.size, self._kernel = size, kernel
        self._slowest = 0.0
        self._all_there = False
        self._hosts = [] if size.one_process else [self._start_host(index, group) for index in range(size.hosts)]
        self._server = (
            ray.remote(ServerActor)
            .options(
                num_cpus=size.cpus_per_host if size.one_process else 0,
                num_gpus=size.gpus_per_host if size.one_process else size.server_gpus,
                name=f"{self._name} server",
                **_placed(group, 0),
            )
            .remote(self._hosts, size.device, self._kernel)
        )

    def _start_host(self, index: int, group: PlacementGroup | None) -> Any:
        beside_server = self.size.server_gpus if index == 0 else 0
        return (
            ray.remote(HostActor)
            .options(
                num_cpus=self.size.cpus_per_host,
                num_gpus=self.size.gpus_per_host - beside_server,
                # a round is a pure function of its arguments, so a host that died is started again and asked again
                max_restarts=HOST_RESTARTS,
                max_task_retries=ROUND_RETRIES,
                name=f"{self._name} host {index}",
                **_placed(group, index),
            )
            .remote(index, self.size.device, self._kernel)
        )

    def lanes_that_fit(self, trials: Sequence[TrialSpec], shipment: Any) -> int | None:
        """Trials like these, side by side, into the memory of a GPU. None: that is no question. `shipment`: here and
        below, or a reference to one, for whoever has no use for what is in it."""
        if self.size.device != "cuda" or len(trials) == 1:
            return None
        return self._answer(self._server.lanes_that_fit.remote(list(trials), shipment, self.size.gpus_per_host))

    def open(self, trials: Sequence[TrialSpec], shipment: Any, snapshot: bytes | None = None) -> None:
        self._answer(self._server.open.remote(list(trials), shipment, snapshot))

    def advance(self, until: int) -> list[LaneResult]:
        """However long it takes."""
        return ray.get(self._server.advance.remote(until))

    def final_weights(self) -> np.ndarray | None:
        """Of a trial that ran to its end in a pack of its own."""
        return ray.get(self._server.final_weights.remote())

    def progress(self, until: int) -> Progress:
        """As `advance`, but says only how it stands."""
        began = time.monotonic()
        found = self._answer(self._server.progress.remote(until))
        self._slowest = max(self._slowest, time.monotonic() - began)
        return found

    def results(self) -> bytes:
        """What is known of every lane, pickled: whoever passes it on need not open it."""
        return self._answer(self._server.pickled_results.remote())

    def snapshot(self) -> bytes:
        return self._answer(self._server.snapshot.remote())

    def _answer(self, call: Any) -> Any:
        """The server's. One that hangs is found, more patiently than a host; a process that never starts, sooner."""
        if not self._all_there:
            starting = [actor.__ray_ready__.remote() for actor in (self._server, *self._hosts)]
            _, missing = ray.wait(starting, num_returns=len(starting), timeout=START_PATIENCE_S)
            if missing:
                index = starting.index(missing[0])
                name = f"client host {index - 1}" if index else "the server"
                raise HungError(f"{name} has not started within {START_PATIENCE_S:.0f} s")
            self._all_there = True
        patience = max(2 * PATIENCE_S, 2 * SLOWEST_TIMES * self._slowest)
        try:
            return ray.get(call, timeout=patience)
        except ray.exceptions.GetTimeoutError:
            raise HungError(f"the server has not answered for {patience:.0f} s") from None

    def close(self) -> None:
        for actor in (self._server, *self._hosts):
            ray.kill(actor, no_restart=True)


def _placed(group: PlacementGroup | None, index: int) -> dict[str, Any]:
    """Where an actor goes: into a bundle of the trial's placement group (which has none for the trial itself)."""
    if group is None:
        return {}
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)}


def start_in_slot(size: FederationSize, kernel: Kernel, study: str) -> Federation:
    """In the placement group of the slot that calls this."""
    return Federation(size, ray.util.get_current_placement_group(), kernel, f"fedsweep {study}")
