"""Several nodes: a real Ray cluster on this machine loses nodes and gets new ones in the middle of a round, and leaves
the tables of a local run."""

import json
import pickle
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import small
from nodes import HOST, Cluster, free_port, peak_bytes, thaw, title_of, wait_for
from ray.util.placement_group import placement_group, remove_placement_group

from orchestrator.execution import study_run
from orchestrator.execution.backends import ray as ray_backend
from orchestrator.execution.cluster import head, nodes
from orchestrator.execution.progress import View
from orchestrator.results.ledger import Ledger
from orchestrator.study.reading import parse
from trainables.errors import UserError
from trainables.federation import checkpoint_writer, pack_runner
from trainables.federation.checkpoints import PackStorage, checkpoint_name
from trainables.federation.federation_size import FederationSize
from trainables.federation.messages import Order
from trainables.ray_actors import slot
from trainables.ray_actors.federation import RayFederation
from trainables.ray_actors.object_store import ObjectStoreProblems

pytestmark = [pytest.mark.ray, pytest.mark.nodes]

FEDSWEEP = Path(sys.executable).with_name("fedsweep")
STUDY = """\
name: nodes
data: [{source: "synthetic-frozen:40000,300,40,4", label: small}]
partitions: [iid]
clients: 4
methods:
  - dp-fedgd: {coarse: {learning_rate: [0.1, 0.3, 1]}, fine: {learning_rate: [0.2, 0.5]}}
  - dp-scaffold:
      fixed: {local_steps: 2}
      coarse: {server_learning_rate: [0.3, 1]}
      fine: {server_learning_rate: [0.5]}
epsilons: [40]
defaults: paper
privacy: {clip: 2}
rounds: {coarse: 200, fine: 30, confirm: 30}
seeds: {search: 42, contest: [], confirm: [42, 7]}
search: {refine: table}
evaluate_every: 30
resources: {gpus_per_host: 0}
"""


def published(folder: Path) -> dict[str, bytes]:
    """The tables and the chosen values, which contain no times."""
    files = [*sorted((folder / "tables").rglob("*")), folder / "best.yaml"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("study") / "nodes.yaml"
    file.write_text(STUDY)
    return file


@pytest.fixture(scope="module")
def expected(local_ray, tmp_path_factory) -> dict[str, bytes]:
    """The tables of a run on a local Ray."""
    folder = tmp_path_factory.mktemp("local")
    assert study_run.run(parse(STUDY, "nodes.yaml", folder), STUDY, folder, View()).complete
    return published(folder)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three nodes of two cores."""
    made = Cluster(tmp_path_factory.mktemp("c"), (2, 2, 2), "--include-dashboard=false")
    yield made
    made.close()


ON_A_NODE = """\
import sys, ray
from orchestrator.cli import main
address, ip = sys.argv[1:3]
del sys.argv[1:3]
ray.init(address, _node_ip_address=ip, log_to_driver=False)
main()
"""
"""The command on one node of several on one machine, where Ray would take the head's."""


class Driver:
    """`fedsweep run` on the cluster, in its own process."""

    def __init__(
        self, cluster: Cluster, study: Path, folder: Path, *options: str, on: str | None = None, **environment: str
    ) -> None:
        self.folder = folder
        self._err = folder.with_suffix(".err")
        command = [sys.executable, "-c", ON_A_NODE, cluster.address, on] if on else [FEDSWEEP]
        self._process = subprocess.Popen(
            [*command, "run", study, "--results", folder, "--json", *options],
            env={**cluster.environment, **environment},
            stdout=folder.with_suffix(".out").open("w"),
            stderr=self._err.open("w"),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def finished(self) -> dict:
        assert self._process.wait(timeout=400) == 0, self._err.read_text()[-2000:]
        return json.loads(subprocess.check_output([FEDSWEEP, "status", self.folder, "--json"]))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def run(cluster, study, tmp_path):
    started = []

    def start(*options: str, **environment: str) -> Driver:
        started.append(Driver(cluster, study, tmp_path / "results", *options, **environment))
        return started[-1]

    yield start
    for driver in started:
        driver.end()


def hosts(cluster: Cluster) -> list[int]:
    """Client hosts, node by node."""
    return [len(node.processes(HOST)) for node in cluster.nodes]


def test_a_node_is_lost_in_a_round_and_another_one_joins(cluster, run, expected):
    """The hosts of a federation are spread, one on each node though two would fit. The one of the lost node starts
    again on another and is asked again."""
    one = ("--resource", "placement=spread", "--resource", "hosts=3", "--resource", "federations=1")
    driver = run("--address", cluster.address, *one)
    wait_for(lambda: hosts(cluster) == [1, 1, 1], "a host was on every node", driver.alive)
    lost = cluster.nodes[-1]
    lost.freeze_in_a_round(driver.alive)
    lost.kill()
    cluster.add(2)
    assert driver.finished()["finished"]
    assert published(driver.folder) == expected


def test_a_whole_federation_is_lost(cluster, run, expected):
    """By default a federation stays on one node, here the only one that is large enough. When that is lost, the pack
    is taken up again on the next one. The cluster is named as `ray job submit` names it."""
    large = cluster.add(3)
    driver = run("--resource", "hosts=3", RAY_ADDRESS=cluster.address)
    large.freeze_in_a_round(driver.alive)
    wait_for(lambda: len(large.processes(HOST)) == 3, "all hosts were on the large node", driver.alive)
    assert sum(hosts(cluster)) == 3
    large.kill()
    large = cluster.add(3)
    wait_for(lambda: len(large.processes(HOST)) == 3, "the federation was on the new node", driver.alive)
    assert len(driver.finished()["retries"]) >= 1
    assert "its packs are retried without counting as failed" in (driver.folder / "fedsweep.log").read_text()
    assert published(driver.folder) == expected


def test_a_head_that_is_restarted(study, tmp_path_factory, expected):
    """Its state is in a Redis, and the driver on another node: while the head is gone the round that was begun waits,
    and nothing is begun again."""
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("there is no redis-server here")
    folder = tmp_path_factory.mktemp("h")
    port = free_port("127.0.0.1")
    redis = subprocess.Popen([server, "--port", str(port), "--save", "", "--dir", folder], stdout=subprocess.DEVNULL)
    wait_for(lambda: _listens(port), "Redis was up", lambda: redis.poll() is None)
    told = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}", head.RAY_TIMEOUT: "150"}
    cluster = Cluster(folder, (0, 2, 2), "--include-dashboard=false", **told)
    driver = Driver(cluster, study, folder / "results", on=cluster.nodes[1].ip)
    try:
        frozen = cluster.nodes[2].freeze_in_a_round(driver.alive)
        cluster.nodes[0].kill()
        cluster.head_again()
        thaw(frozen)
        status = driver.finished()
    finally:
        driver.end()
        cluster.close()
        redis.kill()
        redis.wait()
    assert status["finished"]
    assert status["retries"] == []
    assert published(driver.folder) == expected


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_an_autoscaler_starts_nodes_for_waiting_slots(study, tmp_path_factory, expected):
    """A head without processors, and an autoscaler that starts nodes for what waits: Ray's own, with nodes that it only
    pretends to rent. The study asks for its first node, then for a second federation's, and no more."""
    folder = tmp_path_factory.mktemp("e")
    port = free_port("127.0.0.2")
    node = {"CPU": 1, "object_store_memory": 100_000_000}
    config = {
        "cluster_name": "elastic",
        "max_workers": 4,
        "idle_timeout_minutes": 60,
        "upscaling_speed": 20,
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "gcs_address": f"127.0.0.2:{port}",
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": node, "node_config": {}, "min_workers": 0, "max_workers": 4},
        },
        "head_node_type": "ray.head.default",
        "auth": {},
        "file_mounts": {},  # what a launcher would have filled in
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }
    file = folder / "autoscaling.json"
    file.write_text(json.dumps(config))
    elastic = Cluster(
        folder,
        (0,),
        f"--port={port}",
        f"--autoscaling-config={file}",
        "--include-dashboard=false",
        RAY_FAKE_CLUSTER="1",
        AUTOSCALER_UPDATE_INTERVAL_S="1",
    )
    try:
        options = ("--resource", "hosts=1", "--resource", "federations=2", "--resource", "lanes_per_pack=1")
        driver = Driver(elastic, study, folder / "results", "--address", elastic.address, *options)
        try:
            assert driver.finished()["finished"]
        finally:
            driver.end()
    finally:
        elastic.close()
    assert published(folder / "results") == expected
    said = (folder / "results.out").read_text()
    assert "needs 1 CPU on one node, which none has; waiting for nodes" in said
    assert "2 federations run now" in (folder / "results" / "fedsweep.log").read_text()


def test_a_busy_cluster_is_reported_and_waited_for(local_ray, tmp_path, monkeypatch, expected):
    """Another job has all processors; the view names it, and the study starts when they are free."""
    monkeypatch.setattr(ray_backend, "REPORT_BUSY_EVERY_S", 0.0)
    monkeypatch.setattr(ray_backend, "CHECK_NODES_EVERY_S", 0.1)
    other = placement_group([{"CPU": 2}])
    ray.get(other.ready())
    said = []

    class Hears(View):
        def say(self, sentence):
            said.append(sentence)
            if "busy" in sentence:
                remove_placement_group(other)

    assert study_run.run(parse(STUDY, "nodes.yaml", tmp_path), STUDY, tmp_path, Hears()).complete
    assert any(sentence.startswith("the cluster is busy: no node has room for a federation") for sentence in said)
    assert published(tmp_path) == expected


def test_two_studies_share_a_cluster(study, tmp_path, tmp_path_factory, expected):
    """The first has both processors and stands still in a round: the second says who has them, and waits. With one
    federation each, both compute at once; all leave the tables of a local run."""
    cluster = Cluster(tmp_path_factory.mktemp("c"), (2,), "--include-dashboard=false")
    drivers = []

    def start(name: str, *options: str) -> Driver:
        drivers.append(Driver(cluster, study, tmp_path / name, "--address", cluster.address, *options))
        return drivers[-1]

    try:
        first = start("first")
        frozen = cluster.nodes[0].freeze_in_a_round(first.alive)
        second = start("second")
        said = (tmp_path / "second.out").read_text
        wait_for(lambda: "the cluster is busy" in said(), "the second had said so", second.alive)
        assert "2 CPU and" in said()
        assert f"run {study} --results {tmp_path / 'first'}" in said()
        thaw(frozen)
        assert first.finished()["finished"]
        assert second.finished()["finished"]
        one = ("--resource", "federations=1", "--resource", "hosts=1")
        both = [start("third", *one), start("fourth", *one)]
        thaw(cluster.nodes[0].freeze_in_a_round(lambda: all(d.alive() for d in both), 2))
        assert all(driver.finished()["finished"] for driver in both)
    finally:
        for driver in drivers:
            driver.end()
        cluster.close()
    for name in ("first", "second", "third", "fourth"):
        assert published(tmp_path / name) == expected


EIGHT = """\
name: eight
data: [{source: "synthetic-frozen:20000,500,64,10", label: eight}]
partitions: [iid]
clients: 4
methods:
  - dp-fedgd: {coarse: {learning_rate: [0.1, 0.3, 1, 3]}, fine: {learning_rate: [0.2, 0.5]}}
epsilons: [40, 10]
defaults: paper
rounds: {coarse: 60, fine: 20, confirm: 20}
seeds: {search: 42, contest: [], confirm: [7]}
search: {refine: table}
evaluate_every: 30
resources: {gpus_per_host: 0, hosts: 1, lanes_per_pack: 1}
"""


@pytest.mark.timeout(900)
def test_eight_federations_compute_at_once_with_the_results_of_one(tmp_path, tmp_path_factory):
    """On a Ray that was told of eight processors: eight client hosts, each a process, are stopped in the middle of a
    round, so all eight compute at one moment; then they go on."""
    study = tmp_path / "eight.yaml"
    study.write_text(EIGHT)
    cluster = Cluster(tmp_path_factory.mktemp("c"), (8,), "--include-dashboard=false")
    try:
        for most in (8, 1):
            options = ("--address", cluster.address, "--resource", f"federations={most}")
            driver = Driver(cluster, study, tmp_path / f"with-{most}", *options)
            try:
                thaw(cluster.nodes[0].freeze_in_a_round(driver.alive, most))
                assert driver.finished()["finished"]
            finally:
                driver.end()
    finally:
        cluster.close()
    assert published(tmp_path / "with-8") == published(tmp_path / "with-1")


COPIES = """
import json, ray, small
from orchestrator.execution.cluster.connect import connected
from trainables.federation.federation_size import FederationSize
from trainables.ray_actors.federation import RayFederation
from trainables.federation.checkpoints import PackStorage
from trainables.ray_actors.object_store import ObjectStoreProblems
from ray.util.placement_group import placement_group
problem = small.problem(data="synthetic-frozen:20000,100,64,10")
with connected({address!r}):
    group = placement_group([{{"CPU": 1}}] * {hosts}, strategy="SPREAD")
    ray.get(group.ready())
    federation = RayFederation(FederationSize(hosts={hosts}), group)
    data = ObjectStoreProblems().data(problem)
    federation.open([small.trial(problem, "dp-fedgd", rounds=1)], data)
    federation.advance(1)
    ask = lambda self: ray.get_runtime_context().get_node_id()
    places = ray.get([host.__ray_call__.remote(ask) for host in federation._hosts])
    held = ray.experimental.get_object_locations([data.x.reference])[data.x.reference]["node_ids"]
    print(json.dumps({{"hosts": places, "copies": held, "driver": ray.get_runtime_context().get_node_id()}}))
"""


def test_arrays_are_copied_once_to_every_node(cluster, repository):
    """Through the object store: one copy per node that needs it, for any number of hosts."""
    script = COPIES.format(address=cluster.address, hosts=4)
    out = subprocess.check_output(
        [sys.executable, "-c", script],
        env={**cluster.environment, "PYTHONPATH": str(repository / "tests")},
        timeout=180,
    )
    found = json.loads(out.splitlines()[-1])
    assert len(found["hosts"]) == 4
    assert len(set(found["hosts"])) >= 3
    assert sorted(found["copies"]) == sorted({*found["hosts"], found["driver"]})


# ---- with one node, which pretends to be several


@pytest.fixture
def large(tmp_path) -> Path:
    """1.1 GB of features in a file; three classes that are easy to separate."""
    rng = np.random.default_rng(5)
    rows, features = 280_000, 1000
    y = rng.integers(0, 3, rows)
    x = np.empty((rows, features), np.float32)
    for first in range(0, rows, 20_000):
        part = rng.standard_normal((20_000, features), np.float32)
        part[np.arange(20_000), y[first : first + 20_000]] += 3
        x[first : first + 20_000] = part
    path = tmp_path / "large.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x[:500], y_test=y[:500])
    return path


def test_data_larger_than_the_memory_of_any_node(large, tmp_path, tmp_path_factory):
    """Eleven times an object store, spread over four nodes: every host reads its clients' rows from the file, and
    no process has ever held as much as there is."""
    study = tmp_path / "large.yaml"
    study.write_text(
        f"""\
name: large
data: [{{source: {large}, label: large}}]
partitions: [iid]
clients: 8
methods: [dp-fedgd: {{coarse: {{learning_rate: [0.1, 1]}}, fine: {{learning_rate: [0.3]}}}}]
epsilons: [40]
defaults: paper
privacy: {{clip: 10}}
rounds: {{coarse: 3, fine: 3, confirm: 5}}
seeds: {{search: 42, contest: [], confirm: [7]}}
search: {{refine: table}}
validation: {{fraction: 0.01, seed: 1}}
resources: {{gpus_per_host: 0, hosts: 4, placement: spread}}
"""
    )
    cluster = Cluster(tmp_path_factory.mktemp("c"), (1, 1, 1, 1), "--include-dashboard=false")
    driver = Driver(cluster, study, tmp_path / "results", "--address", cluster.address)
    most: dict[str, int] = {}
    try:
        wait_for(lambda: hosts(cluster) == [1, 1, 1, 1], "a host was on every node", driver.alive)
        while driver.alive():
            for pid in [driver.pid, *(pid for node in cluster.nodes for pid in node.processes())]:
                name = title_of(pid).partition(".")[0][:40]
                most[name] = max(most.get(name, 0), peak_bytes(pid))
            time.sleep(0.5)
        assert driver.finished()["finished"]
    finally:
        driver.end()
        cluster.close()
    assert any(name.startswith(HOST) for name in most)
    too_much = {name: peak for name, peak in most.items() if peak > 280_000 * 1000 * 4}
    assert not too_much, most
    with Ledger.read(tmp_path / "results") as ledger:
        confirmed = [row.accuracy for row in ledger.rows(ledger.outcomes()).values() if row.rounds == 5]
    assert min(confirmed) > 60, "chance is a third"


def test_federations_get_smaller_after_nodes_are_lost(local_ray, tmp_path, monkeypatch, expected):
    """Planned for two cores, one of which is lost when the first pack starts."""
    plans = []
    there = lambda: [{"CPU": 1.0 if plans else 2.0}]  # noqa: E731
    monkeypatch.setattr(nodes, "current", lambda: nodes.ClusterNodes({"a": there()[0]}))
    monkeypatch.setattr(nodes, "free_resources", lambda *_: there())
    monkeypatch.setattr(ray_backend, "CHECK_NODES_EVERY_S", 0.0)
    monkeypatch.setattr(ray_backend, "WAIT_FOR_NODES_S", 0.0)

    class Plans(View):
        def started(self, sweep, size):
            plans.append((size.federations, size.size.hosts))

    assert study_run.run(parse(STUDY, "nodes.yaml", tmp_path), STUDY, tmp_path, Plans()).complete
    assert plans == [(1, 2), (1, 1)]
    assert published(tmp_path) == expected


def test_nodes_that_join_are_used(local_ray, tmp_path, monkeypatch):
    """Planned for one core; from the second check on there are two."""
    looks = iter([1.0])
    monkeypatch.setattr(nodes, "current", lambda: nodes.ClusterNodes({"a": {"CPU": next(looks, 2.0)}}))
    monkeypatch.setattr(nodes, "free_resources", lambda *_: [{"CPU": 1.0}])
    monkeypatch.setattr(ray_backend, "CHECK_NODES_EVERY_S", 0.0)
    most = []

    class Busy(View):
        def changed(self, running):
            most.append(len(running.in_flight))

    assert study_run.run(parse(STUDY, "nodes.yaml", tmp_path), STUDY, tmp_path, Busy()).complete
    assert max(most) == 2


def test_no_node_has_room_any_more(local_ray, tmp_path, monkeypatch):
    rooms = iter([2.0])
    monkeypatch.setattr(nodes, "current", lambda: nodes.ClusterNodes({"a": {"CPU": next(rooms, 0.0)}}))
    monkeypatch.setattr(ray_backend, "CHECK_NODES_EVERY_S", 0.0)
    monkeypatch.setattr(ray_backend, "WAIT_FOR_NODES_S", 0.0)
    with pytest.raises(UserError, match=r"^resources: a federation of 1 hosts needs 1 CPU on one node, which none has"):
        study_run.run(parse(STUDY, "nodes.yaml", tmp_path), STUDY, tmp_path, View())


class Desk:
    """Offers one pack and records the reports, with the interface of an actor."""

    def __init__(self, trials, data, resume_from: str = "") -> None:
        self.orders, self.reports = [Order(1, pickle.dumps(trials), resume_from=resume_from, data=data)], []
        self.take = SimpleNamespace(remote=self._take)

    def _take(self, *request) -> ray.ObjectRef:
        self.reports += filter(None, request[-1:])
        return ray.put(self.orders.pop() if self.orders else None)

    @property
    def lanes(self) -> list:
        return pickle.loads(self.reports[-1].lanes)


@pytest.fixture
def ran(local_ray, small_problem, monkeypatch):
    """A slot in this process, which runs one pack and writes a checkpoint after every chunk."""
    monkeypatch.setattr(checkpoint_writer, "EVERY_S", -1.0)
    monkeypatch.setattr(checkpoint_writer, "SHARE", 1e9)
    monkeypatch.setattr(pack_runner, "CHUNK_S", 0.0)

    def write_now(write: checkpoint_writer._Write) -> None:
        write.run()
        write.seconds = 0.0  # after a slow write, rounds would go without a checkpoint

    monkeypatch.setattr(checkpoint_writer._Write, "start", write_now)
    trials = [small.trial(small_problem, "dp-scaffold", {"local_steps": 2}, rounds=8, seed=seed) for seed in range(3)]
    data = ObjectStoreProblems().reference(small_problem)

    def run(storage: PackStorage, resume_from: str = "", of=trials) -> tuple[list, Desk]:
        desk = Desk(of, data, resume_from)
        one = slot.PackSlot.__new__(slot.PackSlot)
        one.setup({"slot": "here"}, desk, lambda: RayFederation(FederationSize()), storage)
        try:
            while not desk.reports:
                one.step()
        finally:
            one.cleanup()
        return of, desk

    return run


def bits(desk: Desk) -> dict:
    return {lane.key: (lane.state, lane.rounds, lane.metrics, lane.correct) for lane in desk.lanes}


def test_checkpoints_are_written_only_if_the_folder_is_reachable(ran, tmp_path):
    """On a node that does not see the driver's folder, no checkpoint is written, and nothing fails."""
    trials, desk = ran(PackStorage(str(tmp_path)))
    name = checkpoint_name(trial.key for trial in trials)
    assert (desk.reports[-1].kind, desk.reports[-1].checkpoint) == ("ended", name)
    assert list(PackStorage(str(tmp_path)).trials_by_checkpoint()) == [name]
    _, desk = ran(PackStorage(str(tmp_path / "elsewhere")))
    assert (desk.reports[-1].kind, desk.reports[-1].checkpoint) == ("ended", "")


def test_a_pack_and_a_part_of_it_resume_from_its_checkpoint(ran, tmp_path):
    """Between two evaluations, with client states: the same bits, whole or split."""
    storage = PackStorage(str(tmp_path))
    trials, desk = ran(storage)
    name, whole = checkpoint_name(trial.key for trial in trials), bits(desk)
    t, _ = storage.load(name)
    assert t == 7
    assert bits(ran(storage, name)[1]) == whole
    part = trials[1:]
    _, desk = ran(storage, name, part)
    assert bits(desk) == {trial.key: whole[trial.key] for trial in part}
    assert not any(report.notes for report in desk.reports)


def test_a_checkpoint_that_cannot_be_reached(ran, tmp_path):
    """The pack was saved on another node, whose folder this one does not see: it restarts, with the same bits."""
    trials, first = ran(PackStorage(str(tmp_path)))
    _, again = ran(PackStorage(str(tmp_path / "elsewhere")), checkpoint_name(trial.key for trial in trials))
    assert bits(again) == bits(first)
    notes = [note for report in again.reports for note in report.notes]
    assert notes[0] == "pack of 3 trials restarts from round 0: no checkpoint"
    assert all("could not write a checkpoint" in note for note in notes[1:])


def test_a_checkpoint_that_cannot_be_used(ran, tmp_path):
    """It is readable but does not fit: the pack restarts, with the same bits."""
    storage = PackStorage(str(tmp_path))
    trials, first = ran(storage)
    name = checkpoint_name(trial.key for trial in trials)
    storage.save([trial.key for trial in trials], 3, b"of another program")
    _, again = ran(storage, name)
    assert bits(again) == bits(first)
    (note,) = [note for report in again.reports for note in report.notes]
    assert note.startswith("pack of 3 trials restarts from round 0: its checkpoint cannot be used: ")
