"""A federation on Ray: one server actor and its client-host actors, which serve one pack after the other.

The process that starts a federation does not import torch, which takes seconds: only the actors do.
"""

from __future__ import annotations

import os
import pickle
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainables.code_identity import (
    CodeIdentity,
    OtherCodeError,
    accelerator_name,
    check,
    code_identity,
    differences,
    digest,
)
from trainables.federation.federation_size import FederationSize
from trainables.federation.lane_result import LaneResult, Progress
from trainables.federation.malloc import keep_freed_memory
from trainables.federation.trial_spec import TrialSpec
from trainables.ray_actors import timeouts
from trainables.ray_actors.errors import ActorLostError, HungError

if TYPE_CHECKING:
    from trainables.federation.client_host import ClientStates
    from trainables.federation.pack import ClientWork
    from trainables.models.kernels import Kernel

HOST_RESTARTS = 8  # restarts of a host before its federation is given up
ROUND_RETRIES = 2  # retries of a call whose host crashed: a third crash is treated as deterministic


class CheckedActor:
    """An actor that computes with the driver's code or not at all. Its constructor compares the code. Ray calls the
    constructor again when it restarts the actor, perhaps on another node."""

    def _compare_code(self, expected: CodeIdentity | None, device: str, kernel: Kernel) -> None:
        """Called by the constructor. Raises nothing, because Ray would keep only the text; `node_id` raises."""
        from trainables.models.kernel_build import kernel_build

        identity = code_identity(kernel_build(kernel))
        self._differences = "" if expected is None else differences(expected, identity)
        self._accelerator = accelerator_name(device)
        self._digest = digest(identity, self._accelerator)

    def node_id(self) -> str:
        """The id of its node. Raises if its code differs from the driver's."""
        node = ray.get_runtime_context().get_node_id()
        if self._differences:
            raise OtherCodeError(self._differences, node)
        return node

    def identify(self) -> tuple[str, str, str]:
        """The id of its node, the model of its GPU, and the digest of its code."""
        return self.node_id(), self._accelerator, self._digest


class HostActor(CheckedActor):
    """A client host in its own process. Messages carry NumPy arrays: Ray sends those without a copy."""

    def __init__(self, index: int, device: str, kernel: Kernel, code: CodeIdentity | None = None) -> None:
        from trainables.federation.client_host import ClientHost
        from trainables.models import kernels

        keep_freed_memory()
        kernels.choose(kernel, device)
        self._compare_code(code, device, kernel)
        self._host = ClientHost(index, device)
        self._work: tuple[str, ClientWork] | None = None

    def location(self) -> tuple[str, str]:
        """The id of its node, and a description for messages."""
        node = ray.get_runtime_context().get_node_id()
        return node, f"node {ray.util.get_node_ip_address()}, process {os.getpid()}"

    def prepare(self, work: Sequence[Any]) -> np.ndarray:
        return self._host.prepare(self._fetch(work)).cpu().numpy()

    def round(
        self, work: Sequence[Any], t: int, broadcast: dict[str, np.ndarray], diagnose: bool
    ) -> tuple[np.ndarray, list[np.ndarray] | None]:
        import torch

        # copies: arrays from the object store are read-only, which torch warns about
        tensors = {name: torch.from_numpy(array.copy()) for name, array in broadcast.items()}
        reply = self._host.round(self._fetch(work), t, tensors, diagnose)
        diagnostics = vars(reply.diagnostics).values() if reply.diagnostics else None
        return reply.total.cpu().numpy(), [part.cpu().numpy() for part in diagnostics] if diagnostics else None

    def states(self) -> ClientStates | None:
        return self._host.states()

    def restore(self, work: Sequence[Any], states: ClientStates) -> None:
        self._host.restore(self._fetch(work), states)

    def _fetch(self, work: Sequence[Any]) -> ClientWork:
        """`work` is a reference in a list, which Ray does not resolve: the host fetches it once per pack."""
        self.node_id()  # raises if the code differs
        (reference,) = work
        if self._work is None or self._work[0] != reference.hex():
            self._work = (reference.hex(), ray.get(reference))
        return self._work[1]


class ServerActor(CheckedActor):
    """The server in its own process."""

    def __init__(self, hosts: Sequence[Any], device: str, kernel: Kernel, code: CodeIdentity | None = None) -> None:
        """Without `hosts` the only host shares this process."""
        from trainables.federation.hosts import Hosts
        from trainables.federation.server import Server
        from trainables.ray_actors.remote_hosts import RemoteHosts

        keep_freed_memory()
        self._server = Server(RemoteHosts(hosts) if hosts else Hosts(1, device), device, kernel)
        self._compare_code(code, device, kernel)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._server, method)(*arguments)

    def progress(self, until: int) -> Progress:
        """Run rounds, as `Server.progress` does. The results are pickled here: otherwise every process that passes on
        the results of 2,048 lanes would take 0.1 s to unpickle and pickle them."""
        progress = self._server.progress(until)
        return replace(progress, results=pickle.dumps(progress.results))


class RayFederation:
    """Starts the actors of a federation and calls its server. `data` is a `ProblemData` or a reference to one."""

    def __init__(
        self,
        size: FederationSize,
        group: PlacementGroup | None = None,
        kernel: Kernel | None = None,
        name: str = "fedsweep",
        code: CodeIdentity | None = None,
    ) -> None:
        """`kernel`: used by all hosts; default: the one this process has chosen. `name`: prefix of the actors' names in
        Ray's lists. `code`: the identity that all actors must have; default: not checked."""
        self._name = f"{name} {secrets.token_hex(3)}"  # unique: a dead actor may still be listed
        if kernel is None:
            from trainables.models import kernels

            kernel = kernels.chosen(size.device)
        self.size, self._kernel, self._group, self._expected_code = size, kernel, group, code
        self._slowest = 0.0
        self.nodes: tuple[str, ...] = ()
        """The nodes of its actors, the server's first, once all have started."""
        self.accelerator = ""
        """The name of its GPUs; empty on CPUs."""
        self.code = ""
        """The digest of its code, once all actors have started."""
        self._hosts = [] if size.one_process else [self._start_host(index) for index in range(size.hosts)]
        self._server = (
            ray.remote(ServerActor)
            .options(
                num_cpus=size.cpus_per_host if size.one_process else 0,
                num_gpus=size.gpus_per_host if size.one_process else size.server_gpus,
                name=f"{self._name} server",
                **self._placement(0),
            )
            .remote(self._hosts, size.device, kernel, code)
        )

    def _start_host(self, index: int) -> Any:
        shared_with_server = self.size.server_gpus if index == 0 else 0
        return (
            ray.remote(HostActor)
            .options(
                num_cpus=self.size.cpus_per_host,
                num_gpus=self.size.gpus_per_host - shared_with_server,
                # a round is a pure function of its arguments: a crashed host is restarted and the call repeated
                max_restarts=HOST_RESTARTS,
                max_task_retries=ROUND_RETRIES,
                name=f"{self._name} host {index}",
                **self._placement(index),
            )
            .remote(index, self.size.device, self._kernel, self._expected_code)
        )

    def _placement(self, bundle: int) -> dict[str, Any]:
        if self._group is None:
            return {}
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"scheduling_strategy": strategy}

    def lanes_that_fit(self, trials: Sequence[TrialSpec], data: Any) -> int | None:
        """How many trials like these fit into the memory of the GPUs; None: no limit, as on a CPU."""
        if self.size.device == "cpu":
            return None
        return self._wait(self._server.call.remote("lanes_that_fit", list(trials), data, self.size.gpus_per_host))

    def open(
        self, trials: Sequence[TrialSpec], data: Any, checkpoint: bytes | None = None, paused: Sequence[bytes] = ()
    ) -> None:
        self._slowest = 0.0  # hosts may load other rows: the next call has the timeout of a first one
        self._wait(self._server.call.remote("open", list(trials), data, checkpoint, list(paused)))

    def advance(self, until: int) -> list[LaneResult]:
        """Run rounds up to and including `until`, without a timeout."""
        return ray.get(self._server.call.remote("advance", until))

    def final_weights(self) -> np.ndarray | None:
        return ray.get(self._server.call.remote("final_weights"))

    def progress(self, until: int) -> Progress:
        began = time.monotonic()
        progress = self._wait(self._server.progress.remote(until))
        self._slowest = max(self._slowest, time.monotonic() - began)
        return progress

    def checkpoint(self) -> bytes:
        return self._wait(self._server.call.remote("checkpoint"))

    def paused(self) -> tuple[list[str], bytes] | None:
        return self._wait(self._server.call.remote("paused"))

    def wait_until_started(self) -> None:
        if self.nodes:
            return
        starting = [actor.identify.remote() for actor in (self._server, *self._hosts)]
        _, missing = ray.wait(starting, num_returns=len(starting), timeout=timeouts.START_S)
        if missing:
            index = starting.index(missing[0])
            name = f"client host {index - 1}" if index else "the server"
            raise HungError(f"{name} has not started within {timeouts.START_S:.0f} s", self._node_of(index))
        nodes = []
        for index, answer in enumerate(starting):
            try:
                node, accelerator, self.code = ray.get(answer)
            except RayActorError as error:
                raise ActorLostError.of(error, self._node_of(index)) from None
            nodes.append(node)
            self.accelerator = self.accelerator or accelerator
            check({"accelerator": self.accelerator}, {"accelerator": accelerator}, node)
        self.nodes = tuple(dict.fromkeys(nodes))

    def _node_of(self, index: int) -> str:
        """The node that was reserved for the server (0) or a client host (1 and up); empty if it is not known."""
        if self._group is None:
            return ""
        try:
            nodes = placement_group_table(self._group)["bundles_to_node_id"]
        except RayError:
            return ""
        return nodes.get(max(0, index - 1), "")

    def _wait(self, answer: Any) -> Any:
        """Wait longer than the server waits for a host, so that the server can report which host has hung."""
        self.wait_until_started()
        timeout = 2 * timeouts.FIRST_ANSWER_S
        if self._slowest:
            timeout = 2 * max(timeouts.LEAST_S, timeouts.SLOWEST_TIMES * self._slowest)
        try:
            return ray.get(answer, timeout=timeout)
        except GetTimeoutError:
            raise HungError(f"the server has not answered for {timeout:.0f} s", self.nodes[0]) from None
        except RayActorError as error:
            raise ActorLostError.of(error) from None

    def close(self) -> None:
        for actor in (self._server, *self._hosts):
            ray.kill(actor, no_restart=True)


def start_in_slot(size: FederationSize, kernel: Kernel, study: str, code: CodeIdentity) -> RayFederation:
    """Start a federation in the placement group of the calling slot."""
    federation = RayFederation(size, ray.util.get_current_placement_group(), kernel, f"fedsweep {study}", code)
    federation.wait_until_started()
    return federation
