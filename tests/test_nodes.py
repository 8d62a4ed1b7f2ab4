"""Several nodes: a real Ray cluster on this machine loses nodes and gets new ones in the middle of a round, and leaves
the tables of a local run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import small
from nodes import Cluster, wait_for
from ray import tune

from orchestrator.running import runner, sweeping
from orchestrator.running.progress import View
from orchestrator.study.reading import parse
from trainables import pack_trial
from trainables.errors import UserError
from trainables.federation import FederationSize
from trainables.pack_storage import PackStorage
from trainables.problem import Shipper

pytestmark = [pytest.mark.ray, pytest.mark.nodes]

HOST = "ray::HostActor"
FEDSWEEP = Path(sys.executable).with_name("fedsweep")
STUDY = """\
name: nodes
data: [{source: "synthetic-frozen:3000,300,20,4", label: small}]
partitions: [iid]
clients: 4
methods:
  - dp-fedgd: {coarse: {learning_rate: [0.1, 0.3, 1]}, fine: {learning_rate: [0.2, 0.5]}}
  - dp-scaffold:
      fixed: {local_steps: 2}
      coarse: {server_learning_rate: [0.3, 1]}
      fine: {server_learning_rate: [0.5]}
epsilons: [40]
privacy: {clip: 2}
rounds: {coarse: 60, fine: 30, confirm: 30}
seeds: {search: 42, contest: [], confirm: [42, 7]}
search: {refine: table}
evaluate_every: 30
resources: {gpus_per_host: 0}
"""


def shown(folder: Path) -> dict[str, bytes]:
    """All that holds no clock time: the tables and the chosen values."""
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
    assert sweeping.run(parse(STUDY, "nodes.yaml", folder), STUDY, folder, View()).complete
    return shown(folder)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three nodes of two cores."""
    made = Cluster(tmp_path_factory.mktemp("c"), (2, 2, 2), "--include-dashboard=false")
    yield made
    made.close()


class Driver:
    """`fedsweep run` on the cluster, as a process of its own."""

    def __init__(self, cluster: Cluster, study: Path, folder: Path, *options: str, **environment: str) -> None:
        self.folder = folder
        self._err = folder.with_suffix(".err")
        self._process = subprocess.Popen(
            [FEDSWEEP, "run", study, "--results", folder, "--json", *options],
            env={**cluster.environment, **environment},
            stdout=folder.with_suffix(".out").open("w"),
            stderr=self._err.open("w"),
        )

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


def test_a_node_is_lost_in_a_round_and_another_one_comes(cluster, run, expected):
    """The hosts of a federation are spread, one on each node though two would fit. The one of the lost node starts
    again on another and is asked again."""
    driver = run("--address", cluster.address, "--resource", "placement=spread", "--resource", "hosts=3")
    wait_for(lambda: hosts(cluster) == [1, 1, 1], "a host was on every node", driver.alive)
    lost = cluster.nodes[-1]
    lost.freeze_in_a_round()
    lost.kill()
    cluster.add(2)
    assert driver.finished()["finished"]
    assert shown(driver.folder) == expected


def test_a_whole_federation_is_lost(cluster, run, expected):
    """By default a federation stays on one node, here the only one that is large enough. When that is lost, the pack
    is taken up again on the next one. The cluster is named as `ray job submit` names it."""
    large = cluster.add(3)
    driver = run("--resource", "hosts=3", RAY_ADDRESS=cluster.address)
    large.freeze_in_a_round()
    wait_for(lambda: len(large.processes(HOST)) == 3, "all hosts were on the large node", driver.alive)
    assert sum(hosts(cluster)) == 3
    large.kill()
    large = cluster.add(3)
    wait_for(lambda: len(large.processes(HOST)) == 3, "the federation was on the new node", driver.alive)
    assert len(driver.finished()["retries"]) >= 1
    assert shown(driver.folder) == expected


SHIP = """
import json, ray, small
from orchestrator.running.cluster import connected
from trainables.federation import Federation, FederationSize
from trainables.pack_storage import PackStorage
from trainables.problem import Shipper
from ray.util.placement_group import placement_group
problem = small.problem(data="synthetic-frozen:20000,100,64,10")
with connected({address!r}):
    group = placement_group([{{"CPU": 1}}] * {hosts}, strategy="SPREAD")
    ray.get(group.ready())
    federation = Federation(FederationSize(hosts={hosts}), group)
    shipment = Shipper().ship(problem)
    federation.open([small.trial(problem, "dp-fedgd", rounds=1)], shipment)
    federation.advance(1)
    ask = lambda self: ray.get_runtime_context().get_node_id()
    places = ray.get([host.__ray_call__.remote(ask) for host in federation._hosts])
    held = ray.experimental.get_object_locations([shipment.x])[shipment.x]["node_ids"]
    print(json.dumps({{"hosts": places, "copies": held, "driver": ray.get_runtime_context().get_node_id()}}))
"""


def test_shards_go_once_to_every_node(cluster, repository):
    """Through the object store: as many copies as nodes that need one, however many hosts a node has."""
    script = SHIP.format(address=cluster.address, hosts=4)
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


def test_federations_get_smaller_where_nodes_are_gone_for_good(local_ray, tmp_path, monkeypatch, expected):
    """Planned for two cores, of which one is gone when the first pack starts: nothing waits for ever."""
    plans = []
    monkeypatch.setattr(runner, "node_resources", lambda: [{"CPU": 1.0 if plans else 2.0}])
    monkeypatch.setattr(runner, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(runner, "WAIT_FOR_NODES_S", 0.0)

    class Plans(View):
        def started(self, sweep, size):
            plans.append((size.federations, size.size.hosts))

    assert sweeping.run(parse(STUDY, "nodes.yaml", tmp_path), STUDY, tmp_path, Plans()).complete
    assert plans == [(1, 2), (1, 1)]
    assert shown(tmp_path) == expected


def test_nodes_that_come_are_used(local_ray, tmp_path, monkeypatch):
    """Planned for one core; from the second look on there are two."""
    looks = iter([1.0])
    monkeypatch.setattr(runner, "node_resources", lambda: [{"CPU": next(looks, 2.0)}])
    monkeypatch.setattr(runner, "LOOK_EVERY_S", 0.0)
    most = []

    class Busy(View):
        def changed(self, running):
            most.append(len(running.in_flight))

    assert sweeping.run(parse(STUDY, "nodes.yaml", tmp_path), STUDY, tmp_path, Busy()).complete
    assert max(most) == 2


def test_nobody_has_room_any_more(local_ray, tmp_path, monkeypatch):
    rooms = iter([2.0])
    monkeypatch.setattr(runner, "node_resources", lambda: [{"CPU": next(rooms, 0.0)}])
    monkeypatch.setattr(runner, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(runner, "WAIT_FOR_NODES_S", 0.0)
    with pytest.raises(UserError, match=r"^resources: a federation of 1 hosts needs 1 CPU on one node, which none has"):
        sweeping.run(parse(STUDY, "nodes.yaml", tmp_path), STUDY, tmp_path, View())


@pytest.fixture
def pack(local_ray, small_problem, monkeypatch):
    """A pack as Tune makes it, in this process; it would save after every step."""
    monkeypatch.setattr(pack_trial, "CHECKPOINT_EVERY_S", -1.0)
    trials = [small.trial(small_problem, "dp-fedgd", rounds=8)]
    shipments = {small_problem.spec.key: Shipper().ship(small_problem)}
    made = []

    def make(storage: PackStorage) -> pack_trial.PackTrial:
        given = {"shipments": shipments, "size": FederationSize(), "storage": storage}
        made.append(tune.with_parameters(pack_trial.PackTrial, **given)({"trials": trials}))
        return made[-1]

    yield make
    for trial in made:
        trial.stop()


def test_a_pack_saves_only_where_it_can(pack, tmp_path):
    """A node that does not see the driver's folder leaves no checkpoints, instead of failing with each."""
    assert pack(PackStorage(str(tmp_path))).train()["should_checkpoint"]
    assert "should_checkpoint" not in pack(PackStorage(str(tmp_path / "elsewhere"))).train()


def test_a_checkpoint_that_is_out_of_reach(pack, tmp_path):
    """The pack was saved on another node, whose folder this one does not see: it starts again, with the same bits."""
    trial = pack(PackStorage(str(tmp_path)))
    first, last = trial.train(), trial.train()
    assert (first["round"], last["round"], last["done"]) == (4, 8, True)
    trial.restore(tune.Checkpoint.from_directory(tmp_path / "elsewhere"))
    again, at_last = trial.train(), trial.train()
    assert (again["round"], at_last["round"]) == (4, 8)
    assert at_last["lanes"][0]["metrics"] == last["lanes"][0]["metrics"]
