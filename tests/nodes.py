"""A Ray cluster of several nodes on this machine: each node is a `ray start` with its own raylet, session folder,
object store, resources and loopback address."""

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
IN_A_ROUND = "ray::HostActor.round"  # title of a host's process during a round


def wait_for(condition: Callable[[], Any], what: str, alive: Callable[[], bool] = lambda: True) -> Any:
    """The value of the condition as soon as it is true; fails after a timeout, or if `alive` is false."""
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
        """The processes of this node whose title starts with `title`."""
        mine = [pid for pid, fields in _running().items() if int(fields[3]) == self._process.pid]
        return [pid for pid in mine if title_of(pid).startswith(title)]

    def freeze_in_a_round(self, alive: Callable[[], bool], count: int = 1) -> list[int]:
        """Stop this many client hosts of the node, each in the middle of a round."""
        frozen: list[int] = []

        def enough() -> bool:
            waiting = [pid for pid in self.processes(HOST) if pid not in frozen]
            for _ in range(1000):  # listing all processes takes longer than a round
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
        """Kill all processes of the node at once."""
        for pid in self.processes():
            _signal(pid, signal.SIGKILL)
        self._process.wait()
        wait_for(lambda: not self.processes(), f"the node {self.ip} was gone")


class Cluster:
    """`close` kills all nodes."""

    def __init__(self, folder: Path, cpus: tuple[int, ...], *head_options: str, **environment: str) -> None:
        self.folder = folder
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        self.environment = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_health_check_period_ms": "500",  # a dead node is noticed within seconds, not 15
            **environment,
        }
        """Of every node and driver, with the cluster's token."""
        self.nodes: list[Node] = []
        self._head_options = head_options
        self._add(cpus[0], *head_options).up()
        self.address = self.nodes[0].address
        for node in [self._add(count) for count in cpus[1:]]:
            node.up()

    def _add(self, cpus: int, *options: str) -> Node:
        number = len(self.nodes)
        address = self.nodes[0].address if self.nodes else None
        # not 127.0.0.1, which Ray replaces by the machine's network address
        place = self.folder / str(number), f"127.0.0.{number + 2}"
        self.nodes.append(Node(*place, cpus, address, self.environment, *options))
        return self.nodes[-1]

    def add(self, cpus: int) -> Node:
        return self._add(cpus).up()

    def head_again(self) -> Node:
        """A new head without processors, at the address of the lost one."""
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
    """State, parent, group, session and so on of a process; empty if it has ended."""
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
    """This process and all its descendants."""
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
    """Peak memory of a process; 0 if it has ended."""
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
