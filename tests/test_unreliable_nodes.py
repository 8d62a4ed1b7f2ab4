"""Nodes that have other code, cannot start anything, hang, or are preempted with a short notice: the study goes on and
gives the same bytes as an undisturbed run."""

import json
import os
import re
import shutil
import signal
import time
from datetime import datetime
from pathlib import Path

import chaos
import pytest
import saboteur
from chaos import Cluster, Driver, Left, Moment
from repository_files import REPOSITORY

pytestmark = [pytest.mark.ray, pytest.mark.chaos]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Left:
    return chaos.run_alone(tmp_path_factory.mktemp("undisturbed") / "results", chaos.study())


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "results"


def finished(driver: Driver, undisturbed: Left) -> None:
    code = driver.end()
    assert code == 0, f"{driver.said}\n{chaos.log(driver.folder)}"
    assert Left.of(driver.folder) == undisturbed


def trials_by_node(folder: Path) -> dict[str, int]:
    with chaos.Ledger.read(folder) as ledger:
        return ledger.trials_by_node()


# ---- other code


def with_a_larger_step(folder: Path) -> str:
    """Another copy of `trainables`, whose DP-FedGD takes steps that are 1.5 times as large; a search path."""
    shutil.copytree(REPOSITORY / "trainables", folder / "trainables", ignore=shutil.ignore_patterns("__pycache__"))
    method = folder / "trainables" / "methods" / "dp_fedgd.py"
    source = method.read_text()
    assert "return theta - " in source
    method.write_text(source.replace("return theta - ", "return theta - 1.5 * "))
    return os.pathsep.join([str(folder), chaos.ENVIRONMENT["PYTHONPATH"]])


def test_a_node_with_other_code_computes_nothing(folder, undisturbed, tmp_path, tally):
    """It is named, and the study runs on the other node. Without the other node, the study stops with that sentence."""
    sentence = r"node skewed has other code than the driver: package trainables is \w+ instead of \w+"
    other = with_a_larger_step(tmp_path / "other")
    with Cluster(nodes=0) as cluster:
        cluster.add("skewed", PYTHONPATH=other)
        good = cluster.add("good")
        with Driver.run(folder, chaos.study(hosts=1), "--address", cluster.address) as driver:
            finished(driver, undisturbed)
            assert re.search(f"^{sentence}; the node gets no packs", driver.said, re.MULTILINE)
        assert trials_by_node(folder) == {"good": len(undisturbed.trials)}
        tally.add("node with other code", "coarse")
        cluster.lose(good)
        with Driver.run(tmp_path / "alone", chaos.study(hosts=1), "--address", cluster.address) as driver:
            assert driver.end() == 2, driver.said
            assert re.search(rf"^fedsweep: no trial can run here: {sentence}\.$", driver.said, re.MULTILINE)
        tally.add("node with other code", "elsewhere")
    assert chaos.ledger(tmp_path / "alone")[0] == {}


STEPPING = """
from trainables.methods.dp_fedgd import DPFedGD

class Stepping(DPFedGD):
    name = "dp-stepping"
    def step(self, t, theta, G, state, hypers):
        return theta - 1.0 * hypers["learning_rate"] * G
"""
WITH_PLUGIN = """\
name: stepping
data: [{source: "synthetic-frozen:400,100,6,3", label: chaos}]
clients: 4
partitions: [iid]
methods: [{dp-stepping: {label: Stepping, coarse: {learning_rate: [0.1, 1, 3]}, fine: {learning_rate: [2]}}}]
epsilons: [40]
defaults: paper
rounds: {coarse: 10, fine: 10, confirm: 10}
seeds: {search: 42, contest: [], confirm: [42]}
search: {refine: table}
resources: {gpus_per_host: 0, hosts: 1, lanes_per_pack: 1, federations: 3}
"""


def test_nodes_with_another_plug_in_or_kernel_compute_nothing(folder, tmp_path, tally):
    """Slots load no plug-ins and no kernels: the servers and client hosts notice. The plug-in has a larger step on one
    node, and the compiler of another sums other blocks of rows. Both are named before a node that is right joins."""
    for place, step in (("right", "1.0"), ("wrong", "1.5")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "stepping_plugin.py").write_text(STEPPING.replace("1.0", step))
    plugin = ("--import", str(tmp_path / "right" / "stepping_plugin.py"))
    with Driver.run(tmp_path / "calm", WITH_PLUGIN, "--backend", "local", *plugin) as driver:
        assert driver.end() == 0, driver.said
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -UTILE -DTILE=64\n')
    compiler.chmod(0o755)
    other = "has other code than the driver:"
    sentences = [
        rf"node plugin {other} plug-in stepping_plugin is \w+ instead of \w+; the node gets no packs",
        rf"node kernel {other} kernel is compiled \w+ instead of compiled \w+; the node gets no packs",
    ]
    with Cluster(nodes=0) as cluster:
        path = os.pathsep.join([str(tmp_path / "wrong"), chaos.ENVIRONMENT["PYTHONPATH"]])
        cluster.add("plugin", PYTHONPATH=path)
        cluster.add("kernel", CC=str(compiler))
        with Driver.run(folder, WITH_PLUGIN, "--address", cluster.address, *plugin) as driver:
            both = lambda: all(re.search(sentence, chaos.log(folder)) for sentence in sentences)  # noqa: E731
            driver.wait_until(both, "both nodes are refused")
            tally.add("node with another plug-in", "coarse")
            tally.add("node with another compiler", "coarse")
            cluster.add("good")
            finished(driver, Left.of(tmp_path / "calm"))
            assert all(re.search(f"^{sentence}", driver.said, re.MULTILINE) for sentence in sentences)
    assert trials_by_node(folder) == {"good": 5}


def test_what_a_node_with_other_code_has_computed_is_forgotten(folder, undisturbed, tmp_path, tally):
    """Nothing compares the code here, so that the tables are wrong: `status` shows the node and two digests, and
    `forget --node` and `resume` restore what an undisturbed run leaves."""
    with Cluster(nodes=0, trusting=True) as cluster:
        skewed = cluster.add("skewed", PYTHONPATH=with_a_larger_step(tmp_path / "other"))
        run = ("--address", cluster.address)
        with Driver.run(folder, chaos.study(hosts=1), *run, trusting=True) as driver:
            driver.wait_until(lambda: "trials ended" in chaos.log(folder), "it has computed a pack")
            cluster.add("good")
            assert driver.end() == 0, driver.said
        tally.add("node with other code, check turned off", "coarse")
        assert Left.of(folder).files != undisturbed.files
        computed = trials_by_node(folder)
        with Driver(folder, "status", str(folder)) as status:
            assert status.end() == 0
            assert f"skewed {computed['skewed']}" in status.said
            assert bool(re.search(r"^by code: \w{16} \d+, \w{16} \d+$", status.said, re.MULTILINE)) == (
                len(computed) > 1
            )
        cluster.lose(skewed)
        with Driver(folder, "forget", str(folder), "--node", "skewed") as forget:
            assert forget.end() == 0, forget.said
            assert f"forgot {computed['skewed']} trials of node skewed" in forget.said
        with Driver.resume(folder, *run, trusting=True) as driver:
            assert driver.end() == 0, driver.said
    left = Left.of(folder)
    assert (left.files, left.stages) == (undisturbed.files, undisturbed.stages)
    assert undisturbed.trials.items() <= left.trials.items(), "a wrong winner's confirm runs may remain"
    assert trials_by_node(folder).keys() == {"good"}


# ---- nothing starts


def test_a_node_where_nothing_starts_does_not_end_the_study(folder, undisturbed, tmp_path, tally):
    """It has no place to compile kernels; the other node joins the cluster only when the first has failed."""
    with Cluster(nodes=0) as cluster:
        cluster.add("broken", XDG_CACHE_HOME="/dev/full")
        with Driver.run(folder, chaos.study(hosts=1), "--address", cluster.address) as driver:
            driver.wait_until(lambda: "did not start" in chaos.log(folder), "a slot has failed to start")
            cluster.add("good")
            finished(driver, undisturbed)
    tally.add("node where nothing starts", "coarse")
    assert trials_by_node(folder) == {"good": len(undisturbed.trials)}


# ---- a slot that is stopped


IMPATIENT = (
    "import sys; sys.argv = ['fedsweep', *sys.argv[1:]]\n"
    "from orchestrator.execution import scheduler; scheduler.STALLED_AFTER_S, scheduler.STALLED_TIMES = 3.0, 0.0\n"
    "from orchestrator.execution.backends import ray as backend\n"
    "backend.SLOT_TIMEOUT_S, backend.SLOT_TIMEOUT_TIMES = {}, 0.0"
)


def test_a_stopped_slot_is_noticed(folder, undisturbed, tally):
    """It is alive but sends no heartbeat: `status` says so, and its pack runs elsewhere."""
    with Driver.run(folder, chaos.study(), first=IMPATIENT.format(15.0), checkpoint_every_s=0.2) as driver:
        victim = driver.reach(Moment("coarse", 0.0), "slot process")
        os.kill(victim, signal.SIGSTOP)
        tally.add("slot process hangs", chaos.current_stage(folder))
        driver.wait_until(lambda: "no progress for" in chaos.log(folder), "the pack makes no progress")
        with Driver(folder, "status", str(folder)) as status:
            assert status.end() == 0
            assert re.search(r"^no progress for \d+ s on node \S+: a pack of \d trials$", status.said, re.MULTILINE)
        finished(driver, undisturbed)
    assert re.search(r"a slot on \S+ has not sent a heartbeat for 1\d s and is killed", chaos.log(folder))


def test_cancel_now_ends_a_study_whose_slot_is_stopped(folder, undisturbed, tally):
    with Driver.run(folder, chaos.study(), first=IMPATIENT.format(3600.0), checkpoint_every_s=0.2) as driver:
        victim = driver.reach(Moment("coarse", 0.0), "slot process")
        os.kill(victim, signal.SIGSTOP)
        tally.add("slot process hangs, cancel --now", chaos.current_stage(folder))
        with Driver(folder, "cancel", str(folder), "--now") as cancel:
            assert cancel.end() == 0
        assert driver.end() == 130
    with Driver.resume(folder) as driver:
        finished(driver, undisturbed)


# ---- storage


def test_a_storage_that_fails_for_a_while(folder, undisturbed, tally):
    """Checkpoints are written as soon as it works again; a pack that is lost then resumes from one."""
    order = {"checkpoint_every_s": 0.1, "storage_fails": 2}
    with Driver.run(folder, chaos.study(), **order) as driver:
        driver.wait_until(lambda: chaos.checkpoints(folder), "a checkpoint is written")
        tally.add("storage fails for a while", chaos.current_stage(folder))
        finished(driver, undisturbed)
    log = chaos.log(folder)
    assert "could not write a checkpoint: 503 Slow Down; packs continue without" in log
    assert "checkpoints can be written again, after 2 failed attempts" in log


# ---- a pack that kills nodes

DEADLY = """\
name: deadly
data: [{source: "synthetic-frozen:400,100,6,3", label: chaos}]
clients: 4
partitions: [iid]
methods: [{dp-fedgd: {coarse: {learning_rate: [1.0e-9, 1, 3]}, fine: {learning_rate: [2]}}}]
epsilons: [40]
defaults: paper
rounds: {coarse: 10, fine: 10, confirm: 10}
seeds: {search: 42, contest: [], confirm: [42]}
search: {refine: table}
resources: {gpus_per_host: 0, hosts: 1, lanes_per_pack: 1, federations: 1}
"""
TWO_NODES = "from orchestrator.execution import scheduler; scheduler.LOST_WITH_NODES = 2"


def test_a_trial_that_kills_its_node_is_not_retried_for_ever(folder, tmp_path, tally):
    """It fails after two nodes here (eight by default); all other trials have the results of an undisturbed run."""
    calm = chaos.run_alone(tmp_path / "calm", DEADLY).trials
    (key,) = [key for key, (spec, *_) in calm.items() if json.loads(spec)["hyperparameters"]["learning_rate"] == 1e-9]
    with Cluster(nodes=4, poison=key, victim="node") as cluster:
        order = {"first": TWO_NODES, "poison": key, "victim": "node"}
        with Driver.run(folder, DEADLY, "--address", cluster.address, **order) as driver:
            assert driver.end() == 1, driver.said
    tally.add("trial kills its node", "coarse")
    after = Left.of(folder).trials
    assert after.pop(key)[1] == "failed"
    del calm[key]
    assert after == calm
    with chaos.Ledger.read(folder) as ledger:
        assert "2 nodes died while it ran, and it got no further" in str(ledger.failed())


# ---- a federation on several nodes

ONE_FAILURE = "from orchestrator.execution import node_health; node_health.PACK_FAILURES = 1"


def test_a_fault_of_a_spread_federation_is_blamed_on_the_node_where_it_happens(folder, tmp_path, tally):
    """Two federations on four nodes. On one of them, without a slot, client hosts fail from some moment on: it is
    blocked, here by its first failure, not the node of the slot whose pack fails. No trial fails."""
    study = chaos.study().replace(
        "lanes_per_pack: 4, hosts: 2, federations: 1", "lanes_per_pack: 1, hosts: 2, federations: 2"
    )
    calm = chaos.run_alone(tmp_path / "calm", study)
    broken = tmp_path / "broken"
    broken.mkdir()
    order = {"broken_nodes": str(broken), "round_takes_s": 0.05}
    with Cluster(nodes=0, **order) as cluster:
        nodes = {name: cluster.add(name) for name in ("one", "two", "three", "four")}
        where = ("--address", cluster.address, "--resource", "placement=spread")
        with Driver.run(folder, study, *where, first=ONE_FAILURE, **order) as driver:
            all_hosts = lambda: all(node.processes("client host") for node in nodes.values())  # noqa: E731
            driver.wait_until(lambda: "trials ended" in chaos.log(folder) and all_hosts(), "both federations work")
            far = next(name for name, node in nodes.items() if not node.processes("slot process"))
            (broken / far).touch()
            tally.add("client host fails, federation on several nodes", chaos.current_stage(folder))
            finished(driver, calm)
    log = chaos.log(folder)
    assert re.findall(r"node (\w+) has failed 1 packs in a row and gets no more", log) == [far]


# ---- a node that is slow

RACE = """\
name: race
data: [{source: "synthetic-frozen:400,100,6,3", label: race}]
partitions: [iid]
clients: 4
methods:
  - dp-fedgd: {coarse: {learning_rate: [0.01, 0.03, 0.1, 0.3, 1, 3]}, fine: {learning_rate: [0.05, 0.5, 2]}}
epsilons: [40, 20, 10, 5]
privacy: {clip: 2}
rounds: {coarse: 16, fine: 16, confirm: 16}
seeds: {search: 42, contest: [], confirm: [42, 7, 8]}
search: {refine: table}
evaluate_every: 4
resources: {gpus_per_host: 0, lanes_per_pack: 1, hosts: 1, federations: 4}
"""
ROUND_S = 0.25  # much longer than the computation of a round; a pack takes 4 s


def at(line: str) -> float:
    """The time of a line of the log."""
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def sweep_seconds(folder: Path) -> float:
    """From the start of the first pack to the end of the last: without the start of the federations."""
    lines = chaos.log(folder).splitlines()
    begun = [at(line) for line in lines if "trials starts" in line]
    return max(at(line) for line in lines if "trials ended" in line) - min(begun)


@pytest.mark.timeout(1800)
def test_a_node_that_is_ten_times_slower(tmp_path, tally):
    """The sweep takes at most 1.3 times as long as without that node, because the other nodes compute copies of its
    packs; all tables are the same."""
    calm, took = chaos.run_alone(tmp_path / "calm", RACE), {}
    for slow in (False, True):
        folder = tmp_path / f"slow-{slow}"
        with Cluster(nodes=0, round_takes_s=ROUND_S) as cluster:
            for name in ("one", "two", "three"):
                cluster.add(name)
            if slow:
                cluster.add("slow", **saboteur.environment(round_takes_s=10 * ROUND_S))
            with Driver.run(folder, RACE, "--address", cluster.address, round_takes_s=ROUND_S) as driver:
                finished(driver, calm)
        took[slow] = sweep_seconds(folder)
    tally.add("node ten times slower", "coarse")
    copies = chaos.log(tmp_path / "slow-True").count("is slow on node slow: a copy is offered")
    ratio = took[True] / took[False]
    print(json.dumps({"without_s": took[False], "with_s": took[True], "ratio": round(ratio, 2), "copies": copies}))
    assert copies > 0
    assert "is slow on node" not in chaos.log(tmp_path / "slow-False")
    assert ratio <= 1.3


# ---- preempted nodes

SPOT = """\
name: spot
data: [{source: "synthetic-frozen:20000,200,64,10", label: spot}]
partitions: [iid]
clients: 4
methods:
  - dp-fedgd: {coarse: {learning_rate: [0.03, 0.1, 0.3, 1, 3, 10, 20, 30]}, fine: {learning_rate: [0.5, 2]}}
epsilons: [40]
defaults: paper
privacy: {clip: 2}
rounds: {coarse: 1500, fine: 10, confirm: 10}
seeds: {search: 42, contest: [], confirm: [7]}
search: {refine: table}
evaluate_every: 100
resources: {gpus_per_host: 0, lanes_per_pack: 4, hosts: 1, federations: 2}
"""
NOTICE_S = 15
MOST_IDLE_S = 150  # of a slot: until a new node and its federation have started, on two busy cores


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Left:
    return chaos.run_alone(tmp_path_factory.mktemp("calm") / "results", SPOT)


NO_COPIES = "from orchestrator.execution import scheduler; scheduler.COPY_TIMES = 1e9"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("notice", [True, False])
def test_a_node_is_preempted(folder, calm, notice, tally, tmp_path):
    """With 15 s notice its pack is handed back with a checkpoint, at most one round is computed twice, and nothing new
    starts there. Without notice, the rounds since the last checkpoint are lost. A new node joins either way. Rounds are
    counted where they are computed."""
    order = {"trace": str(tmp_path / "rounds")}
    with Cluster(nodes=0, **order) as cluster:
        cluster.add("stays")
        leaving = cluster.add("leaves")
        with Driver.run(folder, SPOT, "--address", cluster.address, first=NO_COPIES, **order) as driver:
            driver.wait_until(lambda: leaving.processes("client host"), "a client host is there")
            host = leaving.processes("client host")[0]
            until = chaos.cpu_seconds(host) + 6
            driver.wait_until(lambda: chaos.cpu_seconds(host) > until, "it has computed for a while")
            if notice:
                cluster.drain("leaves", NOTICE_S)
                deadline = time.monotonic() + NOTICE_S
                driver.wait_until(lambda: "is handed back" in chaos.log(folder), "its pack is handed back")
                assert time.monotonic() < deadline
                chaos.wait_until(lambda: not leaving.processes("client host"), "its federation has ended")
                assert time.monotonic() < deadline
            tally.add("node preempted, " + ("15 s notice" if notice else "no notice"), "coarse")
            cluster.lose(leaving)
            cluster.add("joins")
            finished(driver, calm)
    log, packs = chaos.log(folder), chaos.Rounds.by_pack(tmp_path / "rounds")
    (moved,) = [pack for pack in packs.values() if any(process == host for _, process, _ in pack.computed)]
    lost, idle = moved.repeated, moved.idle_s
    print(json.dumps({"notice": notice, "repeated_rounds": lost, "idle_slot_seconds": round(idle, 1)}))
    assert sum(pack.repeated for pack in packs.values()) == lost, "of no other pack"
    assert 0 < idle < MOST_IDLE_S
    assert "restarts from round 0" not in log
    assert len(chaos.retries(folder)) == (0 if notice else 1)
    if notice:
        assert lost <= 1
        assert re.findall(r"is handed back at round (\d+)", log) == re.findall(
            r"is started again, from round (\d+)", log
        )
    else:
        assert lost > 1, "the baseline"
