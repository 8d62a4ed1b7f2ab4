"""A local Ray is closed to other users, and files get the permissions of the umask."""

import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from nodes import family
from packaging.requirements import Requirement
from packaging.version import Version
from repository_files import DOCS, REPOSITORY

from orchestrator.execution.cluster import connect, metrics
from orchestrator.execution.cluster.connect import connected
from orchestrator.execution.cluster.listening import Address
from orchestrator.report.tables.render import write_text
from orchestrator.results.ledger import Ledger
from trainables.errors import UserError


def listening(processes: set[int]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses on which these processes listen."""
    waiting = {}
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # LISTEN
                waiting[f"socket:[{fields[9]}]"] = _address(fields[1].partition(":")[0])
    held = set()
    for pid in processes:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                held.add(os.readlink(link))
            except OSError:
                continue  # closed meanwhile
    return [address for name, address in waiting.items() if name in held]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel writes addresses in words of the machine's byte order."""
    words = [int(text[k : k + 8], 16).to_bytes(4, sys.byteorder) for k in range(0, len(text), 8)]
    found = ipaddress.ip_address(b"".join(words))
    return getattr(found, "ipv4_mapped", None) or found


@pytest.mark.ray
def test_the_local_ray_listens_on_loopback_only(local_ray):
    """Its head, its raylet, its agents, an actor and the driver itself."""

    @ray.remote(num_cpus=0)
    class Actor:
        def pid(self) -> int:
            return os.getpid()

    actor = Actor.remote()
    processes = family()
    assert ray.get(actor.pid.remote()) in family()
    found = listening(processes | family())
    assert len(found) >= 5
    assert [address for address in found if not address.is_loopback] == []


def test_a_local_ray_that_other_machines_can_reach_is_stopped(monkeypatch):
    """Like the same Ray without the setting that keeps it on loopback. All its processes are found."""
    started = []

    def init(**_):
        listen = "import socket; s = socket.create_server(('0.0.0.0', 0))"
        program = f"{listen}; print(s.getsockname()[1], flush=True); input()"
        started.append(subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True))
        started.append(started[0].stdout.readline().strip())

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: started[0].communicate("\n"))
    with socket.create_server(("0.0.0.0", 0)), pytest.raises(UserError) as caught:  # the first is not Ray's
        connect._start(2)
    assert f"was stopped: it listens on 0.0.0.0:{started[1]}, which" in str(caught.value)
    assert started[0].returncode == 0


@pytest.mark.parametrize(
    ("ip", "expected"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::", False),
        ("0.0.0.0", False),
        ("10.0.0.7", False),
    ],
)
def test_addresses_that_only_this_machine_can_reach(ip, expected):
    assert Address(ip, 1).is_loopback == expected


def test_the_installed_ray_is_one_of_those_that_were_tested():
    """The page lists the tested versions, and pyproject.toml allows no other minor version."""
    page = (DOCS / "clusters.md").read_text().partition("<!-- versions of Ray")[2].partition("## ")[0]
    tested = [Version(found) for found in re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.MULTILINE)]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (allowed,) = [found for text in project["dependencies"] if (found := Requirement(text)).name == "ray"]
    assert Version(ray.__version__) in tested
    assert all(version in allowed.specifier for version in tested)
    minors = {version.release[:2] for version in tested}
    others = [Version(f"2.{minor}.0") for minor in range(40, 100) if (2, minor) not in minors]
    assert [version for version in others if version in allowed.specifier] == []


CONNECT = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]).get_all_node_info()"


@pytest.mark.ray
@pytest.mark.parametrize(
    ("environment", "accepted"),
    [
        ({}, True),
        ({"RAY_AUTH_MODE": "disabled"}, False),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, False),
    ],
)
def test_the_local_ray_requires_the_users_token(local_ray, environment, accepted):
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, address], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert (done.returncode == 0) == accepted
    assert ("AuthenticationError" in done.stderr) != accepted


def test_only_the_user_can_read_the_token(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    program = (
        "import os; os.umask(0o022); from orchestrator.execution.cluster.connect import _make_token; _make_token()"
    )
    subprocess.run([sys.executable, "-c", program], env={**environment, "HOME": str(tmp_path)}, check=True)
    token = tmp_path / ".ray" / "auth_token"
    assert len(token.read_text()) >= 32
    assert token.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("address", ["ray://somewhere:10001", "http://127.0.0.1:8265"])
def test_addresses_that_cannot_be_joined(address, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    refused = pytest.raises(UserError, match=f"^address = '{address}' is not auto or HOST:PORT; .*ray job submit")
    with refused, connected(address):
        pytest.fail("connected")


def test_results_have_the_permissions_of_the_umask(tmp_path):
    """Exactly those, and files are not executable."""
    for mask, files, folders in ((0o022, 0o644, 0o755), (0o077, 0o600, 0o700)):
        folder = tmp_path / f"{mask:o}"
        before = os.umask(mask)
        try:
            with Ledger.write(folder):
                write_text(folder / "tables" / "a.md", "x")
        finally:
            os.umask(before)
        found = {path.name: path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}
        assert found.pop(folder.name) == found.pop("tables") == folders
        assert set(found.values()) == {files}


def test_a_ray_that_does_not_start_is_one_sentence(monkeypatch):
    """Ray raises plain exceptions of many lines. Processes that it has started are ended."""
    ended = []

    def init(**_):
        raise Exception("The current node timed out during startup. This could happen because\nsomething failed.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append("Ray"))
    sentence = "Ray did not start on this machine: The current node timed out during startup; if the machine is busy"
    with pytest.raises(UserError, match=sentence):
        connect._start(2)
    assert ended == ["Ray"]


def test_metrics_for_the_clusters_monitoring(monkeypatch):
    """Counters grow by the change since the last update; all are tagged with the study."""
    said = []

    class Recorded:
        def __init__(self, name, description, tag_keys):
            self.name, self.tag_keys = name, tag_keys

        def set_default_tags(self, tags):
            assert tuple(tags) == self.tag_keys
            self.study = tags["study"]

        def inc(self, amount):
            said.append((self.study, self.name, amount))

        def set(self, amount):
            said.append((self.study, self.name, amount))

    monkeypatch.setattr(metrics, "Counter", Recorded)
    monkeypatch.setattr(metrics, "Gauge", Recorded)
    study = SimpleNamespace(prepared=SimpleNamespace(study=SimpleNamespace(name="mine")), outcomes={"a": 1})
    scheduler = SimpleNamespace(sweep=study, lane_rounds=5, retries=0, in_flight={1: "pack"})
    seen = metrics.Metrics(scheduler)
    study.outcomes |= {"b": 1, "c": 1}
    scheduler.lane_rounds, scheduler.retries = 25, 1
    seen.update(scheduler)
    assert sorted(said) == [
        ("mine", "fedsweep_faults", 1),
        ("mine", "fedsweep_packs_in_flight", 1),
        ("mine", "fedsweep_rounds", 20),
        ("mine", "fedsweep_trials", 2),
    ]
    said.clear()
    scheduler.in_flight.clear()
    seen.update(scheduler)
    assert said == [("mine", "fedsweep_packs_in_flight", 0)]


def test_ctrl_c_while_a_local_ray_starts(monkeypatch):
    """It is handled once Ray has started, because half-started Rays may crash. A second one is handled at once."""
    done = []

    def start(times):
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        done.append("started")

    monkeypatch.setattr(ray, "shutdown", lambda: done.append("ended"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for times, left in ((1, ["started", "ended"]), (2, ["ended"])):
        monkeypatch.setattr(connect, "_start", lambda cpus, times=times: start(times))
        done.clear()
        with pytest.raises(KeyboardInterrupt), connected():
            pytest.fail("not interrupted")
        assert done == left
