"""The client hosts of a federation, in this process."""

from __future__ import annotations

from typing import Any

import torch

from trainables.federation.client_host import Broadcast, ClientHost, ClientStates, HostReply
from trainables.federation.pack import ClientWork


class Hosts:
    """Calls client hosts one after the other. A pack with few clients does not use all hosts."""

    def __init__(self, count: int, device: str = "cpu") -> None:
        self.count = count
        self._hosts: list[Any] = [ClientHost(index, device) for index in range(count)]

    def prepare(self, work: ClientWork) -> list[torch.Tensor]:
        """What clients release before the first round, summed per host."""
        return [host.prepare(work) for host in self._hosts[: len(work.assignment)]]

    def round(self, work: ClientWork, t: int, broadcast: Broadcast, diagnose: bool) -> list[HostReply]:
        return [host.round(work, t, broadcast, diagnose) for host in self._hosts[: len(work.assignment)]]

    def states(self) -> list[ClientStates | None]:
        return [host.states() for host in self._hosts]

    def restore(self, work: ClientWork, states: ClientStates) -> None:
        """Give every client its state back, on the host that has the client now."""
        for host, clients in zip(self._hosts, work.assignment, strict=False):
            host.restore(work, states.of(clients))
