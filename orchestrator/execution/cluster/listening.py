"""Where this process and the processes that it has started accept connections."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import NamedTuple

from orchestrator.execution.cluster.ray_internals import psutil


class Address(NamedTuple):
    ip: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        address = ipaddress.ip_address(self.ip)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def listening() -> set[Address]:
    this = psutil.Process()
    found: set[Address] = set()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or belongs to another user
            connections = process.net_connections("tcp")
            found.update(Address(*each.laddr) for each in connections if each.status == psutil.CONN_LISTEN)
    return found


def reachable_from_outside(addresses: set[Address]) -> list[Address]:
    return sorted(address for address in addresses if not address.is_loopback)
