"""The addresses at which this process and its child processes listen, and the users whose processes listen at an
address."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.execution.cluster.ray_internals import psutil

LISTEN = "0A"  # the state of a listening socket in /proc/net/tcp
LENGTHS = {8: socket.AF_INET, 32: socket.AF_INET6}  # by the number of hexadecimal digits of an address there


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
    """The TCP addresses at which this process and its child processes listen."""
    this = psutil.Process()
    found: set[Address] = set()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or belongs to another user
            connections = process.net_connections("tcp")
            found.update(Address(*each.laddr) for each in connections if each.status == psutil.CONN_LISTEN)
    return found


def reachable_from_outside(addresses: set[Address]) -> list[Address]:
    return sorted(address for address in addresses if not address.is_loopback)


def owners_of(address: str) -> set[int]:
    """The ids of the users whose processes listen at IP:PORT on this machine. Empty if none does, or if the address may
    be that of another machine."""
    host, _, port = address.rpartition(":")
    try:
        ip = ipaddress.ip_address(_unmapped(host.strip("[]")))
    except ValueError:  # a name may mean several machines
        return set()
    addresses = [each for own in psutil.net_if_addrs().values() for each in own if _is_ip(each)]
    own = {_unmapped(each.address) for each in addresses}
    if "%" in host or ip.is_unspecified or ip.is_link_local or not (ip.is_loopback or str(ip) in own):
        return set()
    # the tables do not say whether a socket at :: serves IPv4, too, so it does not count as a listener for IPv4
    return _listeners(int(port), {str(ip), "::" if ip.version == 6 else "0.0.0.0"})


def _listeners(port: int, ips: set[str]) -> set[int]:
    """The ids of the users whose processes listen on this port at any of these addresses."""
    lines = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for line in Path(table).read_text().splitlines()[1:]
    ]
    sockets = [(*_decoded(line[1]), line[3], int(line[7])) for line in lines]
    return {owner for ip, at, state, owner in sockets if state == LISTEN and at == port and ip in ips}


def _is_ip(address: Any) -> bool:
    return address.family in (socket.AF_INET, socket.AF_INET6)


def _decoded(text: str) -> tuple[str, int]:
    """An address as the kernel writes it: hexadecimal words in the byte order of the machine, then the port."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[start : start + 8]) for start in range(0, len(digits), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return _unmapped(socket.inet_ntop(LENGTHS[len(digits)], packed)), int(port, 16)


def _unmapped(ip: str) -> str:
    """The address without its zone; as IPv4 if it is an IPv4-mapped IPv6 address."""
    parsed = ipaddress.ip_address(ip.partition("%")[0])
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
