"""Fault injection: runs a study as a user would, kills its processes at chosen moments and inspects the results.

A driver runs in its own session, and so does every node of a cluster. Processes that they start stay in that session,
also when their parent has died: so the harness knows its own processes, and touches no others.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import pytest
import saboteur

from orchestrator.execution import study_run
from orchestrator.execution.progress import View
from orchestrator.results.ledger import Ledger, Row
from orchestrator.study.reading import parse
from trainables.errors import UserError
from trainables.federation.pack_runner import CHUNK_S

RAY = str(Path(sys.executable).with_name("ray"))
TESTS = Path(__file__).resolve().parent
STAGES = ("coarse", "fine", "confirm")
ORDER = ("surface", "rung-1", "rung-2", "rung-3", "coarse", "fine", "contest", "confirm")
"""All stages of the studies here."""
TITLES = {  # titles of a pack's processes
    "client host": "ray::HostActor",
    "server": "ray::Server",
    "slot process": "ray::ResourceTrainable",  # Tune's name for a trainable with resources: ours is PackSlot
}
STUDY = """\
name: chaos
data: [{source: "synthetic-frozen:400,100,6,3", label: chaos}]
partitions: [iid]
clients: 4
methods:
  - dp-fedgd:
      coarse: {learning_rate: [0.01, 0.1, 0.3, 1, 3, 10, 30, 1.0e+38]}
      fine: {learning_rate: [0.05, 0.5, 2]}
  - dp-scaffold:
      fixed: {local_steps: 2, server_learning_rate: 1}
      coarse: {client_learning_rate: [0.05, 0.1, 0.5, 1]}
      fine: {client_learning_rate: [0.2, 0.3]}
epsilons: [40]
defaults: paper
privacy: {clip: 2}
rounds: {coarse: 100, fine: 110, confirm: 120}
seeds: {search: 42, contest: [], confirm: [42, 7]}
search: {refine: table}
evaluate_every: 10
"""
LADDER = (
    STUDY.replace("rounds: {coarse: 100, fine: 110,", "rounds: {fine: 108,")
    .replace("seeds: {search: 42, contest: []", "seeds: {search: [42, 43], contest: [5, 6, 8, 9]")
    .replace("search: {refine: table}", "search: {strategies: [halving], trials: 12, finalists: 4}")
)
"""The same methods, searched by halving on two seeds, with a contest."""
SURFACE = (
    STUDY.replace("rounds: {coarse: 100, fine: 110,", "rounds: {fine: 114,")
    .replace(", 1.0e+38]", "]")
    .replace("epsilons: [40]", "epsilons: [20, 40]")
    .replace("seeds: {search: 42, contest: []", "seeds: {search: [42, 43], contest: [5, 6]")
    .replace("search: {refine: table}", "search: {strategies: [surface], trials: 12, finalists: 4}")
)
"""The same methods at two budgets, which one model searches together."""
STAGE_OF_ROUNDS = {
    114: "surface",
    12: "rung-1",
    36: "rung-2",
    108: "rung-3",
    100: "coarse",
    110: "fine",
    120: "confirm",
}
LANES = 4
PATIENCE_S = 1200.0  # longer than anything takes on a loaded machine
ENVIRONMENT = {  # of all processes; the token keeps the clusters private
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(16),
}


def study(hosts: int = 2, text: str = STUDY) -> str:
    """With two hosts there is one federation; with one host, two packs are in flight, on any machine."""
    size = f"gpus_per_host: 0, lanes_per_pack: {LANES}, hosts: {hosts}, federations: {2 // hosts}"
    return f"{text}resources: {{{size}}}\n"


# ---- processes


def session(leader: int) -> dict[int, str]:
    """The processes of a session, with their titles."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # ended meanwhile
                state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(its_session) == leader and state not in "ZX":
                    found[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    )
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of a process; 0 once it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return float("inf")


def stop(pid: int) -> None:
    """Stop a process, and wait until all its threads have stopped: one of them passes the signal on to the others."""

    def stopped() -> bool:
        states = [
            (task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()
        ]
        return set(states) == {"T"}

    os.kill(pid, signal.SIGSTOP)
    wait_until(stopped, f"process {pid} has stopped")


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll the condition; raise an error after a long time."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"for {PATIENCE_S} s this did not happen: {what}")
        time.sleep(0.05)


@dataclass
class Traces:
    """Ports and shared memory of our processes: none may outlive them."""

    ports: set[int] = field(default_factory=set)
    segments: set[str] = field(default_factory=set)

    def follow(self, pids: Iterator[int] | list[int]) -> None:
        sockets = set()
        for pid in pids:
            with contextlib.suppress(OSError):
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        sockets.add(os.readlink(descriptor))
                self.segments.update(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
        self.ports.update(port for port, inode in listening() if f"socket:[{inode}]" in sockets)

    def left(self) -> list[str]:
        open_ports = {port for port, _ in listening()}
        return [f"port {port}" for port in sorted(self.ports & open_ports)] + [
            segment for segment in sorted(self.segments) if Path(segment).exists()
        ]


def listening() -> Iterator[tuple[int, str]]:
    """Every listening TCP port, with the inode of its socket."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    yield int(fields[1].rpartition(":")[2], 16), fields[9]


# ---- a driver


class Driver:
    """`fedsweep` on a results folder, in its own process. `said` is its output.

    `wrapper` is put before the command, `first` is Python to run in it before all else, `seen` is where this process
    finds the folder, and everything else is an order to the saboteur."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        wrapper: tuple[str, ...] = (),
        first: str = "",
        seen: Path | None = None,
        temporary: Path | None = None,
        **sabotage,
    ) -> None:
        self.folder = seen or folder
        # short, because Ray puts its sockets there and their paths may have 107 characters
        self.scratch = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
        self.temporary = temporary or self.scratch
        self.traces, self._looked = Traces(), 0.0
        self._said = self.scratch / "said"
        places = {"TMPDIR": str(self.temporary), "RAY_TMPDIR": str(self.scratch), "COLUMNS": "500"}
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [*wrapper, sys.executable, "-c", f"{first}\nfrom orchestrator.cli import main; main()", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**ENVIRONMENT, **places, **saboteur.environment(**sabotage)},
                start_new_session=True,
            )

    @classmethod
    def run(cls, folder: Path, text: str, *arguments: str, **options) -> Driver:
        study = f"{folder.name}.yaml"
        (options.get("seen") or folder).with_name(study).write_text(text)
        return cls(folder, "run", str(folder.with_name(study)), "--results", str(folder), *arguments, **options)

    @classmethod
    def resume(cls, folder: Path, *arguments: str, **options) -> Driver:
        return cls(folder, "resume", str(folder), *arguments, **options)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all remaining processes."""
        for pid in session(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._words = self.said
        shutil.rmtree(self.scratch, ignore_errors=True)

    @property
    def said(self) -> str:
        return self._said.read_text(errors="replace") if self._said.exists() else self._words

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def processes(self, kind: str) -> list[int]:
        return sorted(pid for pid, title in session(self.process.pid).items() if title.startswith(TITLES[kind]))

    def wait_until(self, condition: Callable[[], object], what: str) -> None:

        def happened() -> bool:
            if condition():
                return True
            if not self.alive:
                raise AssertionError(
                    f"ended with {self.process.returncode} before {what}:\n{self.said}\n{log(self.folder)}"
                )
            return False

        wait_until(happened, what)

    def end(self) -> int:
        """Its exit code, once all its processes have ended."""
        wait_until(lambda: self._look() or not self.alive, f"the driver ends; it said:\n{self.said}")
        wait_until(lambda: not session(self.process.pid), "its processes end")
        return self.process.returncode

    def _look(self) -> None:
        if time.monotonic() - self._looked > 1:  # this is slow
            self._looked = time.monotonic()
            self.traces.follow(list(session(self.process.pid)))

    def left_behind(self) -> list[str]:
        """After its end: processes, ports, shared memory, and files that are not results."""
        logs = self.temporary / f"fedsweep-{os.geteuid()}"  # of the local Ray, which stay
        files = [*({*self.temporary.glob("fedsweep-*")} - {logs}), *self.folder.rglob("*.part")]
        files += self.folder.glob(".packs")
        return [*map(str, session(self.process.pid).items()), *self.traces.left(), *map(str, files)]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Its packs are paused inside the block."""
        stopped = [pid for kind in ("slot process", "server") for pid in self.processes(kind)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    # ---- faults

    def _patiently(self, condition: Callable[[], object], what: str) -> None:
        """Wait until it happens or the driver ends; on a timeout, print everything that may explain it."""
        try:
            wait_until(lambda: not self.alive or condition(), what)
        except TimeoutError as error:
            there = "\n".join(f"{pid} {title[:100]}" for pid, title in sorted(session(self.process.pid).items()))
            raise AssertionError(f"{error}\n{self.said}\n{log(self.folder)}\n{there}") from None

    def reach(self, moment: Moment, kind: str = "server") -> int | None:
        """Wait for the moment; a process of that kind, or None if the study ended before."""

        def there() -> list[int]:
            return self.processes(kind) if moment.has_come(current_stage(self.folder)) else []

        self._patiently(there, f"a {kind} works on {moment.stage}")
        self._look()
        found = there()
        if not found:
            return None
        until = cpu_seconds(found[0]) + moment.after_cpu_s
        self._patiently(lambda: cpu_seconds(found[0]) >= until, f"the {kind} has worked")
        return found[0] if self.alive and running_stages(self.folder) else None

    def strike(self, kind: str, moment: Moment) -> str:
        """SIGKILL a process of that kind at that moment; the current stage, or "" if the study ended before."""
        victim = self.reach(moment, kind)
        if victim is not None:
            stage = current_stage(self.folder)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                return stage
        return ""


@dataclass(frozen=True)
class Moment:
    """In a stage (or the next, if it was too short), after this much CPU time of a process: independent of the speed of
    the machine."""

    stage: str
    after_cpu_s: float

    @classmethod
    def draw(cls, chance: random.Random) -> Moment:
        return cls(chance.choice(STAGES), chance.uniform(0, 0.3))

    def has_come(self, current: str) -> bool:
        return current != "" and ORDER.index(current) >= ORDER.index(self.stage)


# ---- a small disk


class SmallDisk:
    """A small file system in a mount namespace, which needs no root. Commands reach it through `wrapper`, this process
    through `seen`."""

    def __init__(self, mounted_on: Path, size: str = "2m") -> None:
        mounted_on.mkdir(parents=True)
        self.path = mounted_on
        script = 'mount -t tmpfs -o size="$1" tmpfs "$2" && echo ready && exec sleep 1000'
        self._keeper = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", size, str(mounted_on)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.made = self._keeper.stdout.readline() == "ready\n"
        self.wrapper = ("nsenter", f"--target={self._keeper.pid}", "--user", "--mount", "--preserve-credentials")
        self.seen = Path(f"/proc/{self._keeper.pid}/root{mounted_on}")

    def fill(self) -> None:
        """To the last byte."""
        with (self.seen / "ballast").open("ab", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))

    def make_room(self) -> None:
        (self.seen / "ballast").unlink()

    def allow_writing(self, allowed: bool) -> None:
        mode = "rw" if allowed else "ro"
        subprocess.run([*self.wrapper, "mount", "-o", f"remount,{mode}", str(self.path)], check=True)

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper.kill()
        self._keeper.communicate()


@contextlib.contextmanager
def small_disk_on(folder: Path, size: str = "2m") -> Iterator[SmallDisk]:
    """Skips the test if it cannot be made."""
    with SmallDisk(folder, size) as disk:
        if not disk.made:
            pytest.skip(
                "this user may not make a mount namespace (unshare --user --mount), so there is no disk to fill"
            )
        yield disk


# ---- the contents of a folder


def ledger(folder: Path) -> tuple[dict[str, Row], dict[tuple[str, str, str], list[str]]]:
    with Ledger.read(folder) as found:
        return found.rows(found.outcomes()), found.stages()


def checkpoints(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):  # one was replaced meanwhile
        return list(folder.rglob("*.checkpoint"))
    return []


def known_checkpoint(folder: Path) -> Callable[[], bool]:
    """Whether the checkpoint of a pack has been rewritten for long enough that its slot has reported an earlier one."""
    first: dict[Path, int] = {}

    def look() -> bool:
        ages = []
        for path in checkpoints(folder):
            with contextlib.suppress(FileNotFoundError):
                written = path.stat().st_mtime_ns
                ages.append((written - first.setdefault(path, written)) / 1e9)
        return any(age > 3 * CHUNK_S for age in ages)

    return look


def retries(folder: Path) -> list[tuple[int, str, str]]:
    with Ledger.read(folder) as found:
        return found.failures()


def running_stages(folder: Path) -> set[str]:
    """Open stages that have not ended."""
    if not (folder / "ledger.sqlite").is_file():
        return set()
    try:
        with Ledger.read(folder) as found:
            ended, stages = found.outcomes(), found.stages()
    except (UserError, sqlite3.Error):  # the driver is creating it
        return set()
    return {stage for (_, _, stage), keys in stages.items() if any(key not in ended for key in keys)}


def current_stage(folder: Path) -> str:
    """The stage of the pack that started last; empty before the first."""
    begun = re.findall(r"trials starts: \S+ at (\d+) rounds", log(folder))
    stage = STAGE_OF_ROUNDS[int(begun[-1])] if begun else ""
    # a contest has as many rounds as the confirm stage
    return "contest" if stage == "confirm" and "contest" in running_stages(folder) else stage


def log(folder: Path) -> str:
    file = folder / "fedsweep.log"
    return file.read_text() if file.is_file() else ""


def started(folder: Path) -> int:
    """Trials of all packs that were started, without retries."""
    return sum(int(count) for count in re.findall(r"pack of (\d+) trials starts", log(folder)))


def copied(folder: Path) -> int:
    """Trials of packs that seemed slow, of which an idle slot was offered a copy."""
    return sum(int(count) for count in re.findall(r"pack of (\d+) trials is slow on node .*: a copy", log(folder)))


@dataclass(frozen=True)
class Left:
    """Everything in a results folder that must not depend on faults."""

    files: dict[str, bytes]
    trials: dict[str, tuple]
    stages: dict[tuple[str, str, str], list[str]]

    @classmethod
    def of(cls, folder: Path) -> Left:
        files = [*sorted((folder / "tables").rglob("*")), folder / "best.yaml"]
        rows, stages = ledger(folder)
        return cls(
            {str(file.relative_to(folder)): file.read_bytes() for file in files if file.is_file()},
            {
                key: (row.spec, row.state, row.rounds, row.accuracy, row.loss, row.metrics, row.correct)
                for key, row in rows.items()
            },
            stages,
        )


@dataclass(frozen=True)
class Rounds:
    """The rounds that client hosts have computed of a pack, one after the other: see `saboteur.trace`."""

    computed: list[tuple[float, int, int]]
    """Time, process, round."""

    @classmethod
    def by_pack(cls, trace: Path) -> dict[tuple[str, ...], Rounds]:
        found: dict[tuple[str, ...], list[tuple[float, int, int]]] = {}
        for line in trace.read_text().splitlines():
            at, process, t, *trials = line.split()
            found.setdefault(tuple(trials), []).append((float(at), int(process), int(t)))
        return {trials: cls(sorted(computed)) for trials, computed in found.items()}

    @property
    def repeated(self) -> int:
        """Rounds that were computed more than once, each time it was."""
        return len(self.computed) - len({t for *_, t in self.computed})

    @property
    def idle_s(self) -> float:
        """From the last round in a process to the first one in the next."""
        pairs = itertools.pairwise(self.computed)
        return sum(after - before for (before, one, _), (after, other, _) in pairs if one != other)


def run_alone(folder: Path, text: str) -> Left:
    """What a study leaves on the local backend, where nothing disturbs it."""
    study_run.run(parse(text, "study.yaml", Path.cwd()), text, folder, View(), backend="local")
    return Left.of(folder)


# ---- counts


class Tally:
    """How often each fault struck in a test, by kind and stage."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._began = time.monotonic()

    def add(self, kind: str, stage: str) -> None:
        self._counts[kind, stage] += 1

    def record(self) -> dict:
        """For JSON."""
        struck = [[kind, stage, count] for (kind, stage), count in self._counts.items()]
        return {"seconds": time.monotonic() - self._began, "struck": struck}


def write_counts(tests: dict[str, dict], page: Path) -> None:
    """The records of all tests, as a table between the page's two marks."""
    counts: Counter[tuple[str, str]] = Counter()
    for record in tests.values():
        for kind, stage, count in record["struck"]:
            counts[kind, stage] += count
    lines = ["| fault | stages | all |", "|---|---|---:|"]
    for kind in sorted({kind for kind, _ in counts}):
        stages = {stage: counts[kind, stage] for stage in ORDER}
        total = sum(count for (of, _), count in counts.items() if of == kind)
        stages["elsewhere"] = total - sum(stages.values())
        where = ", ".join(stage if count == total else f"{stage} {count}" for stage, count in stages.items() if count)
        lines.append(f"| {kind} | {where} | {total} |")
    lines.append(f"| all | | {counts.total()} |")
    minutes = sum(record["seconds"] for record in tests.values()) / 60
    heading = f"`make chaos` on {date.today()}, {os.cpu_count()} cores, {len(tests)} tests, {minutes:.0f} minutes:"
    before, _, rest = page.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    table = "\n".join(lines)
    page.write_text(f"{before}{MARKS[0]}\n{heading}\n\n{table}\n{MARKS[1]}{after}")


MARKS = ("<!-- counts: written by make chaos -->", "<!-- end of counts -->")


# ---- a cluster


class Node:
    """`ray start` in its own session: to Ray, a machine."""

    def __init__(self, scratch: Path, *arguments: str, variables: dict[str, str] | None = None, **sabotage) -> None:
        environment = {**ENVIRONMENT, **saboteur.environment(**sabotage), **(variables or {})}
        self._said = scratch / f"node-{len(list(scratch.glob('node-*')))}"
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [RAY, "start", "--block", "--disable-usage-stats", "--object-store-memory=200000000", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def up(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"a node ended:\n{self._said.read_text()}")
        return "Ray runtime started" in self._said.read_text(errors="replace")

    def processes(self, kind: str) -> list[int]:
        return sorted(pid for pid, title in session(self.process.pid).items() if title.startswith(TITLES[kind]))

    def freeze(self) -> None:
        """Stop all its processes: alive, but silent."""
        for pid in session(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def kill(self) -> None:
        """Kill all its processes at once, like a power cut."""
        for pid in session(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Cluster:
    """A head without processors, for the driver, and nodes with some for the packs."""

    def __init__(self, nodes: int, cpus: int = 1, **sabotage) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
        self._cpus, self._sabotage = cpus, sabotage
        self.address = f"127.0.0.1:{free_port()}"
        self.nodes: list[Node] = []
        try:
            self.head = self._start(
                "--head",
                f"--port={self.address.rpartition(':')[2]}",
                "--num-cpus=0",
                "--include-dashboard=false",
                f"--temp-dir={self.scratch}",
            )
            for _ in range(nodes):
                self.add()
        except BaseException:
            self.__exit__()
            raise

    def _start(self, *arguments: str, **variables: str) -> Node:
        place = "--node-ip-address=127.0.0.1"
        node = Node(self.scratch, place, *arguments, variables=variables, **self._sabotage)
        self.nodes.append(node)
        wait_until(lambda: node.up, "a node starts")
        return node

    def processes(self, kind: str) -> list[int]:
        return [pid for node in self.nodes for pid in node.processes(kind)]

    def lose(self, node: Node) -> None:
        node.kill()
        self.nodes.remove(node)

    def add(self, name: str = "", **variables: str) -> Node:
        """`name`: in Ray's lists; default: its address. `variables`: of its environment."""
        named = [f"--node-name={name}"] if name else []
        variables = {saboteur.NODE: name, **variables}
        return self._start(f"--address={self.address}", f"--num-cpus={self._cpus}", *named, **variables)

    def drain(self, name: str, seconds: int) -> None:
        """Tell the cluster that a node will be lost after this time, like a cloud that preempts a spot instance."""
        find = (
            f"import ray; ray.init({self.address!r}, logging_level=40, log_to_driver=False); "
            f"print(*[n['NodeID'] for n in ray.nodes() if n['Alive'] and n['NodeName'] == {name!r}])"
        )
        found = subprocess.check_output([sys.executable, "-c", find], env=ENVIRONMENT, text=True)
        reason = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot"]
        where = [f"--address={self.address}", f"--node-id={found.split()[-1]}"]
        subprocess.run(
            [RAY, "drain-node", *where, *reason, f"--deadline-remaining-seconds={seconds}"],
            env=ENVIRONMENT,
            check=True,
            capture_output=True,
        )

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
