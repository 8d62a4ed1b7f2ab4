"""The client hosts of a federation as the server actor sees them: one message out and one back per host and round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError

from trainables.code_identity import OtherCodeError
from trainables.federation.batch_round import Diagnostics
from trainables.federation.client_host import Broadcast, ClientStateLostError, ClientStates, HostReply
from trainables.federation.hosts import Hosts
from trainables.federation.memory_errors import is_out_of_memory
from trainables.federation.pack import ClientWork
from trainables.plugin_errors import PluginError
from trainables.ray_actors import timeouts
from trainables.ray_actors.errors import ActorLostError, HostFailedError, HungError, one_line

SMALL_BYTES = 65_536  # below Ray's limit for arguments that are sent within the call


class RemoteHosts(Hosts):
    def __init__(self, hosts: Sequence[Any]) -> None:
        self.count, self._hosts = len(hosts), list(hosts)
        self._work: tuple[ClientWork, list[Any]] | None = None
        self._slowest = 0.0
        self._locations: list[Any] = []
        """References to the answers of `HostActor.location`."""

    def prepare(self, work: ClientWork) -> list[torch.Tensor]:
        totals = self._call("prepare", [(work,)] * len(work.assignment))
        return [torch.from_numpy(total.copy()) for total in totals]

    def round(self, work: ClientWork, t: int, broadcast: Broadcast, diagnose: bool) -> list[HostReply]:
        arrays: Any = {name: value.cpu().numpy() for name, value in broadcast.items()}
        if sum(array.nbytes for array in arrays.values()) > SMALL_BYTES:
            arrays = ray.put(arrays)  # once for all hosts
        replies = self._call("round", [(work, t, arrays, diagnose)] * len(work.assignment))
        return [
            HostReply(
                torch.from_numpy(total.copy()),
                Diagnostics(*(torch.from_numpy(part.copy()) for part in parts)) if parts else None,
            )
            for total, parts in replies
        ]

    def states(self) -> list[ClientStates | None]:
        return self._call("states", [()] * self.count)

    def restore(self, work: ClientWork, states: ClientStates) -> None:
        self._call("restore", [(work, states.of(clients)) for clients in work.assignment])

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` of host i with `arguments[i]`; hosts without arguments are not called. A host that takes many
        times as long as the slowest call so far has hung."""
        if not self._locations:
            self._locations = [host.location.remote() for host in self._hosts]
        answers = [
            getattr(host, method).remote(*(self._reference(a) if isinstance(a, ClientWork) else a for a in each))
            for host, each in zip(self._hosts, arguments, strict=False)
        ]
        timeout = timeouts.FIRST_ANSWER_S
        if self._slowest:
            timeout = max(timeouts.LEAST_S, timeouts.SLOWEST_TIMES * self._slowest)
        began = time.monotonic()
        _, late = ray.wait(answers, num_returns=len(answers), timeout=timeout)
        if late:
            index = answers.index(late[0])
            node, where = self._location(index)
            raise HungError(f"client host {index}{where} has not answered for {timeout:.0f} s", node)
        try:
            replies = ray.get(answers)
        except RayActorError as error:
            raise ActorLostError.of(error) from None
        except RayTaskError as error:
            if isinstance(error.cause, PluginError):  # as it was raised, without Ray's text around it
                raise error.cause from None
            if isinstance(error.cause, ClientStateLostError | OtherCodeError) or is_out_of_memory(error):
                raise
            raise self._host_failed(answers, error) from None
        self._slowest = max(self._slowest, time.monotonic() - began)
        return replies

    def _host_failed(self, answers: Sequence[Any], error: RayTaskError) -> HostFailedError:
        """The error with the host's node, which may differ from the slot's."""
        index = next(index for index, answer in enumerate(answers) if _is_error(answer))
        node, where = self._location(index)
        return HostFailedError(f"client host {index}{where} failed: {one_line(error)}", node)

    def _location(self, index: int) -> tuple[str, str]:
        """The id of a host's node, and a description for messages; empty if they are not known."""
        try:
            node, text = ray.get(self._locations[index], timeout=0)
        except RayError:
            return "", ""
        return node, f" ({text})"

    def _reference(self, work: ClientWork) -> list[Any]:
        """Put a pack's work into the object store once, not every round."""
        if self._work is None or self._work[0].data.key != work.data.key:
            self._slowest = 0.0  # the next call also loads other rows: it has the timeout of a first call
        if self._work is None or self._work[0] is not work:
            self._work = (work, [ray.put(work)])
        return self._work[1]


def _is_error(answer: Any) -> bool:
    try:
        ray.get(answer)
    except RayTaskError:
        return True
    return False
