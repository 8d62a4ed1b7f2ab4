"""The client hosts of a federation, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainables.federation.client_host import Broadcast, ClientHost, ClientStates, HostReply
from trainables.federation.pack import ClientWork


class Hosts:
    """Calls client hosts one after the other. A subclass may override `_call` to run them in other processes."""

    def __init__(self, count: int, device: str = "cpu") -> None:
        self.count = count
        self._hosts: list[Any] = [ClientHost(index, device) for index in range(count)]

    def prepare(self, work: ClientWork) -> list[torch.Tensor]:
        """What clients release before the first round, summed per host."""
        return self._call("prepare", [(work,)] * len(work.assignment))

    def round(self, work: ClientWork, t: int, broadcast: Broadcast, diagnose: bool) -> list[HostReply]:
        return self._call("round", [(work, t, broadcast, diagnose)] * len(work.assignment))

    def states(self) -> list[ClientStates | None]:
        return self._call("states", [()] * self.count)

    def restore(self, work: ClientWork, states: ClientStates) -> None:
        """Give every client its state back, on the host that has the client now."""
        self._call("restore", [(work, states.of(clients)) for clients in work.assignment])

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` of host i with `arguments[i]`; hosts without arguments are not called."""
        return [getattr(host, method)(*each) for host, each in zip(self._hosts, arguments, strict=False)]
