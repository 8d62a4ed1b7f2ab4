"""A Ray cluster of several nodes on this machine: each node is a `ray start` of its own, with its own raylet, session
folder, object store, resources and loopback address."""

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 240.0
RAY = Path(sys.executable).with_name("ray")
PR_SET_PDEATHSIG = 1
STARTED = "Ray runtime started"
HOST = "ray::HostActor"
IN_A_ROUND = "ray::HostActor.round"  # what Ray calls a host's process meanwhile


def wait_for(condition: Callable[[], Any], what: str, alive: Callable[[], bool] = lambda: True) -> Any:
    """What the condition gives as soon as it is true; fails where it does not become so, or no longer can."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        assert alive(), f"it ended before {what}"
        time.sleep(0.02)
    raise AssertionError(f"waited {PATIENCE_S:.0f} s for {what}")


class Node:
    """One node; `address` is the cluster's, which the first node, its head, opens."""

    def __init__(
        self, folder: Path, ip: str, cpus: int, address: str | None, environment: dict[str, str], *options: str
    ) -> None:
        self.ip, self.folder = ip, folder
        folder.mkdir()
        named = [option.partition("=")[2] for option in options if option.startswith("--port=")]
        self.address = address or f"{ip}:{named[0] if named else free_port(ip)}"
        place = ["--address", address] if address else ["--head", f"--port={self.address.split(':')[1]}"]
        self._log = folder / "start.log"
        self._process = subprocess.Popen(
            [
                *(RAY, "start", "--block", *place, f"--node-ip-address={ip}", f"--num-cpus={cpus}", "--num-gpus=0"),
                *(f"--temp-dir={folder}", "--object-store-memory=100000000", *options),
            ],
            stdout=self._log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM),  # no node outlives the tests
        )

    def up(self) -> "Node":
        wait_for(
            lambda: STARTED in self._log.read_text(),
            f"the node {self.ip} was up, see {self._log}",
            lambda: self._process.poll() is None,
        )
        return self

    def processes(self, title: str = "") -> list[int]:
        """The processes of this node whose command line begins so."""
        mine = [pid for pid, fields in _running().items() if int(fields[3]) == self._process.pid]
        return [pid for pid in mine if title_of(pid).startswith(title)]

    def freeze_in_a_round(self, alive: Callable[[], bool], count: int = 1) -> list[int]:
        """Stops so many client hosts of this node, each while it works on a round, which then cannot end."""
        frozen: list[int] = []

        def enough() -> bool:
            waiting = [pid for pid in self.processes(HOST) if pid not in frozen]
            for _ in range(1000):  # looking through all processes takes longer than a round
                for pid in waiting:
                    if pid not in frozen and title_of(pid).startswith(IN_A_ROUND):
                        _signal(pid, signal.SIGSTOP)
                        wait_for(lambda pid=pid: _state(pid) in ("T", ""), "the host had stopped")
                        if title_of(pid).startswith(IN_A_ROUND):
                            frozen.append(pid)
                        else:
                            _signal(pid, signal.SIGCONT)  # the round had just ended
                if len(frozen) >= count:
                    return True
            return False

        wait_for(enough, f"{count} hosts on {self.ip} were in a round", alive)
        return frozen

    def kill(self) -> None:
        """The machine is gone, from one moment to the next."""
        for pid in self.processes():
            _signal(pid, signal.SIGKILL)
        self._process.wait()
        wait_for(lambda: not self.processes(), f"the node {self.ip} was gone")


class Cluster:
    """Nodes by name. `close` ends whatever is left of them."""

    def __init__(self, folder: Path, cpus: tuple[int, ...], *head_options: str, **environment: str) -> None:
        self.folder = folder
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        self.environment = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_health_check_period_ms": "500",  # a dead node is noticed in seconds, not in a quarter of a minute
            **environment,
        }
        """Of every node and of whoever joins: with the cluster's token."""
        self.nodes: list[Node] = []
        self._head_options = head_options
        self._add(cpus[0], *head_options).up()
        self.address = self.nodes[0].address
        for node in [self._add(count) for count in cpus[1:]]:
            node.up()

    def _add(self, cpus: int, *options: str) -> Node:
        number = len(self.nodes)
        address = self.nodes[0].address if self.nodes else None
        # not 127.0.0.1, which Ray takes for "my address in the network"
        place = self.folder / str(number), f"127.0.0.{number + 2}"
        self.nodes.append(Node(*place, cpus, address, self.environment, *options))
        return self.nodes[-1]

    def add(self, cpus: int) -> Node:
        return self._add(cpus).up()

    def head_again(self) -> Node:
        """A new head where the one that is gone was, without processors."""
        gone = self.nodes[0]
        port = f"--port={gone.address.rpartition(':')[2]}"
        folder = self.folder / f"head-{len(self.nodes)}"
        self.nodes.append(Node(folder, gone.ip, 0, None, self.environment, port, *self._head_options))
        return self.nodes[-1].up()

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.kill()


def free_port(ip: str) -> int:
    with socket.socket() as probe:
        probe.bind((ip, 0))
        return probe.getsockname()[1]


def _fields(pid: int) -> list[str]:
    """What the kernel says of a process: its state, parent, group, session; nothing where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    return (_fields(pid) or [""])[0]


def _running() -> dict[int, list[str]]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {pid: fields for pid in pids if (fields := _fields(pid)) and fields[0] != "Z"}


def family() -> set[int]:
    """This process and all that it has started, however indirectly."""
    found, running = {os.getpid()}, _running()
    while more := {pid for pid, fields in running.items() if int(fields[1]) in found} - found:
        found |= more
    return found


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def peak_bytes(pid: int) -> int:
    """The most memory that a process has ever had; nothing of one that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def thaw(pids: list[int]) -> None:
    for pid in pids:
        _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
