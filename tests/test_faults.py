"""Faults cost no result: a study whose processes, disks or files fail gives the same bytes as an undisturbed run.

`make test` runs a short part with fixed seeds; `make chaos` runs all and counts the faults.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import chaos
import pytest
from chaos import Cluster, Driver, Left, Moment, session, wait_until
from nodes import family, title_of
from simulated_search import trial_of

from orchestrator.execution.cluster import head, ray_internals
from orchestrator.results.locations import PACKS
from orchestrator.study.reading import parse
from trainables.federation.checkpoints import CorruptCheckpointError, PackStorage, checkpoint_name

pytestmark = pytest.mark.ray
IN_COARSE, IN_FINE = (Moment(stage, 0.1) for stage in chaos.STAGES[:2])


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Left:
    """The results of the study on the local backend."""
    left = chaos.run_alone(tmp_path_factory.mktemp("undisturbed") / "results", chaos.study())
    assert len(left.trials) == 21
    return left


@pytest.fixture(scope="module")
def killed() -> Iterator[list[Driver]]:
    """Drivers that were killed. Ray's agents take a minute to notice, so they are checked at the end."""
    found: list[Driver] = []
    yield found
    with contextlib.ExitStack() as drivers:
        for driver in found:
            drivers.enter_context(driver)
        for driver in found:
            wait_until(lambda pid=driver.process.pid: not session(pid), "the processes of a killed driver end")
            assert not [segment for segment in driver.traces.segments if Path(segment).exists()]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "results"


def finished(driver: Driver, undisturbed: Left) -> None:
    """It succeeds with the results of an undisturbed run, and leaves nothing else behind."""
    code = driver.end()
    assert code == 0, driver.said
    assert Left.of(driver.folder) == undisturbed
    assert driver.left_behind() == []


# ---- processes that are killed


def kill(driver: Driver) -> set[int]:
    driver.process.kill()
    driver.process.wait()
    return {-signal.SIGKILL}


def interrupt_once(driver: Driver) -> set[int]:
    os.killpg(driver.process.pid, signal.SIGINT)  # to all processes, as a terminal does
    return {130}


def interrupt_twice(driver: Driver) -> set[int]:
    os.killpg(driver.process.pid, signal.SIGINT)
    wait_until(lambda: not driver.alive or "another Ctrl-C" in chaos.log(driver.folder), "the signal is handled")
    if driver.alive:
        os.killpg(driver.process.pid, signal.SIGINT)
    return {130}


def terminate(driver: Driver) -> set[int]:
    driver.process.terminate()
    return {130}


ENDS = {
    "driver, SIGKILL": kill,
    "driver, Ctrl-C": interrupt_once,
    "driver, Ctrl-C twice": interrupt_twice,
    "driver, SIGTERM": terminate,
}


def plan(seed: int, strikes: int, end: str) -> list[tuple[str, Moment]]:
    """Processes to kill at random moments, and the driver to end at one of them. Servers and slot processes are killed
    twice at most: a pack that fails three times is taken for poisoned, as it should be."""
    chance = random.Random(seed)
    drawn = [(chance.choices([*chaos.TITLES], [3, 1, 1])[0], Moment.draw(chance)) for _ in range(strikes)]
    hosts, others = ([fault for fault in drawn if (fault[0] == "client host") == is_host] for is_host in (True, False))
    faults = [*hosts, *others[:2], (end, Moment.draw(chance))]
    return sorted(faults, key=lambda fault: chaos.STAGES.index(fault[1].stage))


def disturb(
    folder: Path,
    undisturbed: Left,
    killed: list[Driver],
    tally: chaos.Tally,
    faults: list[tuple[str, Moment]],
    hosts: int,
    text: str = chaos.STUDY,
) -> None:
    lost = pack_kills = 0
    rows: dict = {}
    with contextlib.ExitStack() as drivers:
        driver = drivers.enter_context(Driver.run(folder, chaos.study(hosts, text), checkpoint_every_s=0.2))
        for kind, moment in faults:
            if kind in chaos.TITLES:
                stage = driver.strike(kind, moment)
            elif stage := chaos.current_stage(folder) if driver.reach(moment) else "":
                codes = ENDS[kind](driver)
                driver.process.wait(chaos.PATIENCE_S)
                assert driver.process.returncode in codes, driver.said
                rows, begun = chaos.ledger(folder)[0], chaos.started(folder)
                lost = begun - len(rows)
                if kind == "driver, Ctrl-C":  # packs in flight were finished first; one that had died may wait
                    assert lost <= chaos.LANES * pack_kills
                assert lost <= chaos.LANES * (2 // hosts)
                drivers.pop_all()
                killed.append(driver)
                driver = drivers.enter_context(Driver.resume(folder, checkpoint_every_s=0.2))
            if stage:
                tally.add(kind, stage)
                pack_kills += kind in ("server", "slot process")
        finished(driver, undisturbed)
        after = chaos.ledger(folder)[0]
        assert {key: after[key] for key in rows} == rows, "finished trials are unchanged, including durations"
        again = chaos.started(folder) - len(after)
        assert lost <= again <= lost + chaos.copied(folder), "only packs in flight were started again"
        assert len(chaos.retries(folder)) <= pack_kills, "a client host that dies costs no retry"


def test_a_short_chaos(folder, undisturbed, killed, tally):
    """One fault of each kind in one run."""
    faults = [
        ("client host", Moment("coarse", 0.05)),
        ("server", Moment("coarse", 0.2)),
        ("driver, SIGKILL", Moment("fine", 0.05)),
        ("slot process", Moment("confirm", 0.02)),
    ]
    disturb(folder, undisturbed, killed, tally, faults, hosts=2)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(8))
def test_killed_at_random_moments(seed, folder, undisturbed, killed, tally):
    faults = plan(seed, strikes=7, end=list(ENDS)[seed % len(ENDS)])
    disturb(folder, undisturbed, killed, tally, faults, hosts=1 + seed % 2)


@pytest.mark.chaos
@pytest.mark.parametrize("hosts", [1, 2])
def test_faults_in_rungs_and_contests(hosts, folder, tmp_path, killed, tally):
    """The driver is killed in a contest, or on a rung."""
    chaos.run_alone(tmp_path / "alone", chaos.study(text=chaos.LADDER))
    faults = [
        ("client host", Moment("rung-1", 0.02)),
        ("driver, SIGKILL" if hosts == 2 else "server", Moment("rung-2", 0.02)),
        ("slot process" if hosts == 2 else "client host", Moment("rung-3", 0.05)),
        ("client host" if hosts == 2 else "driver, SIGKILL", Moment("contest", 0.05)),
        ("server", Moment("confirm", 0.02)),
    ]
    disturb(folder, Left.of(tmp_path / "alone"), killed, tally, faults, hosts, chaos.LADDER)


@pytest.mark.chaos
def test_faults_in_a_search_of_all_budgets_together(folder, tmp_path, killed, tally):
    """The driver is killed between batches, whose proposals depend on the results of both budgets."""
    chaos.run_alone(tmp_path / "alone", chaos.study(text=chaos.SURFACE))
    faults = [
        ("client host", Moment("surface", 0.02)),
        ("server", Moment("surface", 0.1)),
        ("driver, SIGKILL", Moment("surface", 0.2)),
        ("client host", Moment("contest", 0.05)),
        ("slot process", Moment("confirm", 0.02)),
    ]
    disturb(folder, Left.of(tmp_path / "alone"), killed, tally, faults, 2, chaos.SURFACE)


@pytest.mark.chaos
@pytest.mark.parametrize("end", ["driver, SIGKILL", "driver, Ctrl-C"])
def test_ended_while_ray_starts(end, folder, undisturbed, tally):
    """Before the first pack. Ctrl-C then stops the driver at once."""
    with Driver.run(folder, chaos.study()) as driver:
        driver.wait_until(
            lambda: any("raylet" in title for title in session(driver.process.pid).values()), "Ray starts"
        )
        ENDS[end](driver)
        driver.process.wait(chaos.PATIENCE_S)
        assert driver.process.returncode != 0
        tally.add(end, "Ray starts")
        with Driver.run(folder, chaos.study()) as again:
            finished(again, undisturbed)
        wait_until(lambda: not session(driver.process.pid), "the processes of the first driver end")


@pytest.mark.chaos
def test_a_pack_resumes_from_its_checkpoint_after_the_driver_was_killed(folder, undisturbed, tally):
    """Not from round 0: the checkpoint is named after its trials, and outlives the process that wrote it."""
    with Driver.run(folder, chaos.study(), checkpoint_every_s=0) as driver:
        for _ in range(20):  # a pack may end between the look and the kill, and its checkpoint with it
            driver.wait_until(lambda: chaos.checkpoints(folder), "there is a checkpoint")
            with driver.held():
                if chaos.checkpoints(folder):
                    kill(driver)
                    break
        tally.add("driver, SIGKILL", chaos.current_stage(folder))
    assert chaos.checkpoints(folder)
    with Driver.resume(folder) as driver:
        finished(driver, undisturbed)
    assert "resumes from its last checkpoint" in chaos.log(folder)


@pytest.mark.chaos
def test_a_client_host_that_hangs(folder, undisturbed, tally):
    """It is alive and does not answer, like behind a dead mount: it is named, and its pack runs elsewhere."""
    with Driver.run(folder, chaos.study(), patience_s=5.0, checkpoint_every_s=0.2) as driver:
        victim = driver.reach(IN_COARSE, "client host")
        os.kill(victim, signal.SIGSTOP)
        tally.add("client host hangs", chaos.current_stage(folder))
        finished(driver, undisturbed)
    assert re.search(r"client host \d \(node \S+, process \d+\) has not answered for 5 s", chaos.log(folder))


# ---- nodes


@pytest.mark.chaos
def test_the_desk_is_killed(folder, undisturbed, tally):
    """Its packs resume from their checkpoints."""
    with Driver.run(folder, chaos.study(), checkpoint_every_s=0.2, round_takes_s=0.05) as driver:
        driver.wait_until(chaos.known_checkpoint(folder), "a pack has a checkpoint")
        (desk,) = [pid for pid, title in session(driver.process.pid).items() if title.startswith("ray::PackDesk")]
        os.kill(desk, signal.SIGKILL)
        tally.add("desk", chaos.current_stage(folder))
        finished(driver, undisturbed)
    log = chaos.log(folder)
    assert "the desk was lost; packs in flight will restart from their checkpoints" in log
    assert "trials resumes from its last checkpoint" in log
    assert "restarts from round 0" not in log


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(3))
def test_a_node_is_lost(seed, folder, undisturbed, tally):
    """All its processes at once; its packs resume elsewhere, and a new node joins."""
    chance = random.Random(seed)
    with (
        Cluster(nodes=2, checkpoint_every_s=0.2) as cluster,
        Driver.run(folder, chaos.study(hosts=1), "--address", cluster.address, checkpoint_every_s=0.2) as driver,
    ):
        for stage in sorted(chance.sample(chaos.STAGES, 2), key=chaos.STAGES.index):

            def working() -> list[chaos.Node]:
                return [node for node in cluster.nodes if node.processes("client host")]

            moment = Moment(stage, 0)
            driver.wait_until(lambda m=moment: m.has_come(chaos.current_stage(folder)) and working(), stage)
            if working():
                tally.add("worker node", chaos.current_stage(folder))
                cluster.lose(chance.choice(working()))
                cluster.add()
        finished(driver, undisturbed)
        wait_until(lambda: not any(cluster.processes(kind) for kind in chaos.TITLES), "its actors end")


@pytest.mark.chaos
def test_the_head_is_lost(folder, undisturbed, tally):
    with (
        Cluster(nodes=1) as cluster,
        Driver.run(folder, chaos.study(hosts=1), "--address", cluster.address) as driver,
    ):
        driver.wait_until(lambda: "ended" in chaos.log(folder), "a pack has ended")
        cluster.lose(cluster.head)
        tally.add("head node", "coarse")
        assert driver.end() == 2
        port = cluster.address.rpartition(":")[2]  # Ray may know the head by another name of this machine
        sentence = rf"the head of the Ray cluster at \S+:{port} has not answered for 30 s; no finished trial is lost"
        assert re.search(f"^fedsweep: {sentence}", driver.said, re.MULTILINE)
        assert re.search(sentence, chaos.log(folder))
    with Driver.resume(folder) as driver:
        finished(driver, undisturbed)


def test_a_head_that_does_not_answer_is_detected(monkeypatch, capfd):
    """Without Ray: it answers five times, then no more."""
    monkeypatch.setattr(head, "CHECK_EVERY_S", 0.01)
    ended = head.threading.Event()
    codes = []

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", leave)
    answers = iter([True] * 5)
    monkeypatch.setattr(ray_internals, "head_answers", lambda timeout_s: next(answers, False))
    head._watch("10.0.0.1:6379", ended, 0.1, lambda seconds: "")
    assert next(answers, None) is None
    assert codes == [2]
    assert "fedsweep: the head of the Ray cluster at 10.0.0.1:6379 has not answered" in capfd.readouterr().err


def test_a_local_ray_that_has_died_is_detected(monkeypatch, capfd):
    """Without Ray. Its other processes are killed."""
    monkeypatch.setattr(head, "CHECK_EVERY_S", 0.01)
    ended, calls = head.threading.Event(), []
    monkeypatch.setattr(os, "_exit", lambda code: (calls.append(code), ended.set()))
    monkeypatch.setattr(ray_internals, "head_answers", lambda timeout_s: True)
    monkeypatch.setattr(ray_internals, "dead_local_processes", lambda: ["raylet"])
    monkeypatch.setattr(ray_internals, "kill_local_ray", lambda: calls.append("killed"))
    head._watch("127.0.0.1:6379", ended, 30, lambda seconds: "the lock expires")
    assert calls == ["killed", 2]
    sentence = "the Ray on this machine has lost its raylet; no finished trial is lost, and the same command continues"
    assert f"fedsweep: {sentence}; the lock expires.\n" in capfd.readouterr().err


def test_an_error_does_not_end_the_watch(monkeypatch, caplog):
    """Neither an error in a check nor one while it ends the process."""
    monkeypatch.setattr(head, "CHECK_EVERY_S", 0.01)
    ended, codes, checks = head.threading.Event(), [], iter([1, 1, 1, 0])
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    monkeypatch.setattr(ray_internals, "head_answers", lambda timeout_s: True)

    def check() -> list[str]:
        if next(checks):
            raise RuntimeError("Ray is confused")
        return ["raylet"]

    def leave(seconds: float) -> str:
        raise OSError("no storage")

    monkeypatch.setattr(ray_internals, "dead_local_processes", check)
    monkeypatch.setattr(ray_internals, "kill_local_ray", lambda: None)
    head._watch("127.0.0.1:6379", ended, 30, leave)
    assert codes == [2]
    assert caplog.text.count("the check of the Ray cluster failed, and is repeated: RuntimeError") == 1


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_process_of_the_local_ray_is_killed(name, folder, undisturbed, tally):
    with Driver.run(folder, chaos.study()) as driver:
        driver.wait_until(lambda: "starts" in chaos.log(folder), "a pack has started")
        processes = session(driver.process.pid).items()
        (victim,) = [pid for pid, title in processes if title.partition(" ")[0].endswith(f"/{name}")]
        os.kill(victim, signal.SIGKILL)
        tally.add(f"local Ray, {name}", chaos.current_stage(folder))
        assert driver.end() == 2, driver.said
        assert f"fedsweep: the Ray on this machine has lost its {name}; no finished trial is lost" in driver.said
        assert "state-dump" not in driver.said
        assert not session(driver.process.pid)
    with Driver.resume(folder) as driver:
        finished(driver, undisturbed)


def test_a_frozen_head_gives_no_answer(local_ray):
    """It still accepts connections."""
    (head_process,) = [pid for pid in family() if "gcs_server" in title_of(pid)]
    assert ray_internals.head_answers(10)
    chaos.stop(head_process)
    try:
        assert not ray_internals.head_answers(0.5)
    finally:
        os.kill(head_process, signal.SIGCONT)
    assert ray_internals.head_answers(10)


@pytest.mark.chaos
def test_the_head_is_frozen(folder, undisturbed, tally):
    """Like a head that swaps: its processes are alive and accept connections, but answer nothing."""
    with (
        Cluster(nodes=1) as cluster,
        Driver.run(folder, chaos.study(hosts=1), "--address", cluster.address) as driver,
    ):
        driver.wait_until(lambda: "ended" in chaos.log(folder), "a pack has ended")
        cluster.head.freeze()
        tally.add("head node, frozen", "coarse")
        assert driver.end() == 2
        assert "has not answered for 30 s; no finished trial is lost" in driver.said
    with Driver.resume(folder) as driver:
        finished(driver, undisturbed)


@pytest.mark.parametrize(("ray_timeout", "expected"), [("", 30), ("60", 30), ("150", 120), ("20", 10)])
def test_the_timeout_for_the_head_is_below_rays_own(ray_timeout, expected, monkeypatch):
    monkeypatch.setenv(head.RAY_TIMEOUT, ray_timeout)
    assert head.timeout() == expected


# ---- one driver at a time


def test_ctrl_c_once_and_a_second_driver_meanwhile(folder, undisturbed, tally, fedsweep):
    """The second is refused with the name of the first; the first, interrupted, finishes its packs; the third runs the
    other packs, and none twice."""
    with Driver.run(folder, chaos.study()) as driver:
        driver.reach(Moment("coarse", 0))
        with driver.held():
            holder = f"process {driver.process.pid} on {socket.gethostname()}"
            code, _, err = fedsweep("run", folder.with_name("results.yaml"), "--results", folder)
            assert code == 2
            assert f"fedsweep: results folder {folder} is in use by {holder}." in err
            tally.add("second driver", "coarse")
            code, out, _ = fedsweep("status", folder)
            assert code == 0
            assert f"running ({holder})" in out
            interrupt_once(driver)
            wait_until(lambda: "another Ctrl-C stops at once" in chaos.log(folder), "the signal is handled")
        tally.add("driver, Ctrl-C", "coarse")
        assert driver.end() == 130
        assert (
            f"stopped before the end; finished trials are saved. To continue: fedsweep resume {folder}" in driver.said
        )
        assert driver.left_behind() == []
        assert 0 < chaos.started(folder) == len(chaos.ledger(folder)[0]) < 21
    with Driver.resume(folder) as driver:
        finished(driver, undisturbed)
    assert driver.traces.ports, "the check is not empty"
    assert driver.traces.segments, "the check is not empty"
    assert chaos.started(folder) == 21


# ---- damaged checkpoints


def flip_a_bit(file: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def cut_off(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def remove(file: Path, chance: random.Random) -> None:
    file.unlink()


@pytest.mark.chaos
@pytest.mark.parametrize("damage", [flip_a_bit, cut_off, remove])
def test_a_damaged_checkpoint_is_not_used(damage, folder, undisturbed, tally):
    """The server dies, and the checkpoint of its pack is corrupt: the pack restarts from round 0, with a log entry."""
    with Driver.run(folder, chaos.study(), checkpoint_every_s=0, round_takes_s=0.05) as driver:
        driver.wait_until(chaos.known_checkpoint(folder), "the driver knows of a checkpoint")
        with driver.held():  # so that no newer one takes its place
            for file in chaos.checkpoints(folder):
                with contextlib.suppress(FileNotFoundError):  # an older one, which Tune has just removed
                    damage(file, random.Random(7))
            for pid in driver.processes("server"):
                os.kill(pid, signal.SIGKILL)
        tally.add(f"checkpoint, {damage.__name__.replace('_', ' ')}", "coarse")
        finished(driver, undisturbed)
    assert "restarts from round 0: " in chaos.log(folder)


def test_every_flipped_bit_and_truncation_of_a_checkpoint_is_detected(tmp_path):
    """Including those in the line with the round."""
    storage, keys = PackStorage(str(tmp_path)), ["a", "b"]
    storage.save(keys, 30, b"everything needed to resume")
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    assert storage.load(checkpoint_name(keys)) == (30, b"everything needed to resume")
    cut = [whole[:length] for length in range(len(whole))]
    flipped = [
        whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :]
        for position in range(len(whole))
        for bit in range(8)
    ]
    for content in (*cut, *flipped):
        file.write_bytes(content)
        with pytest.raises(CorruptCheckpointError):
            storage.load(checkpoint_name(keys))


# ---- a full disk


@pytest.fixture
def small_disk(tmp_path):
    with chaos.small_disk_on(tmp_path / "disk") as disk:
        yield disk


@pytest.mark.chaos
def test_a_disk_that_is_full_when_the_ledger_is_written(small_disk, tmp_path, undisturbed, tally):
    """One sentence and exit code 2; finished trials are kept, and with room the study finishes. Then the same for the
    tables: those that were there stay whole."""
    folder, seen = small_disk.path / "results", small_disk.seen / "results"
    there = {"wrapper": small_disk.wrapper, "seen": seen}
    with Driver.run(folder, chaos.study(), **there) as driver:
        driver.wait_until(lambda: "ended" in chaos.log(seen), "a pack has ended")
        small_disk.fill()
        tally.add("full disk, ledger", "coarse")
        assert driver.end() == 2
        assert f"fedsweep: results folder {folder} cannot be written: database or disk is full; no fin" in driver.said
        assert driver.left_behind() == []
    with Driver(folder, "status", str(folder), **there) as driver:
        assert driver.end() == 0, driver.said
        assert "not finished" in driver.said
    before = chaos.ledger(shutil.copytree(seen, tmp_path / "before"))[0]
    assert len(before) >= chaos.LANES
    small_disk.make_room()
    with Driver.resume(folder, **there) as driver:
        assert driver.end() == 0, driver.said
    after = shutil.copytree(seen, tmp_path / "after")
    assert Left.of(after) == undisturbed
    assert {key: row for key, row in chaos.ledger(after)[0].items() if key in before} == before

    small_disk.fill()
    tally.add("full disk, tables", "finished")
    for command in ("tables", "resume"):
        with Driver(folder, command, str(folder), **there) as driver:
            assert driver.end() == 2
            assert driver.said.startswith("fedsweep: ")
            assert "no space left on" in driver.said.lower()
            assert driver.left_behind() == []
    assert Left.of(shutil.copytree(seen, tmp_path / "full")) == undisturbed
    small_disk.make_room()
    with Driver(folder, "tables", str(folder), **there) as driver:
        assert driver.end() == 0


@pytest.mark.chaos
def test_a_disk_that_is_full_when_a_checkpoint_is_written(folder, undisturbed, tally):
    """The pack continues without one, with a log entry; a server that dies then costs rounds, not the study."""
    with chaos.small_disk_on(folder / PACKS) as disk:  # checkpoints have a disk of their own, the ledger another
        with Driver.run(folder, chaos.study(), wrapper=disk.wrapper, checkpoint_every_s=0) as driver:
            driver.wait_until(lambda: chaos.checkpoints(disk.seen), "there is a checkpoint")
            disk.fill()
            tally.add("full disk, checkpoint", "coarse")
            driver.wait_until(lambda: "could not write a checkpoint" in chaos.log(folder), "the log says so")
            driver.strike("server", IN_FINE)
            assert driver.end() == 0, driver.said
        assert driver.left_behind() == [str(folder / PACKS)], "the disk was there"
    assert Left.of(folder) == undisturbed


# ---- poison


POISONED = """\
name: poisoned
data: [{source: "synthetic-frozen:400,100,6,3", label: chaos}]
clients: 4
partitions: [iid]
methods: [{dp-fedgd: {coarse: {learning_rate: [0.01, 1, 3]}, fine: {learning_rate: [2]}}}]
epsilons: [40]
defaults: paper
rounds: {coarse: 10, fine: 10, confirm: 10}
seeds: {search: 42, contest: [], confirm: [42]}
search: {refine: table}
resources: {gpus_per_host: 0, hosts: 1, lanes_per_pack: 4}
"""


@pytest.mark.chaos
@pytest.mark.parametrize("victim", chaos.TITLES)
def test_a_trial_that_always_kills_its_process(victim, folder, tally):
    """One of three trials: three attempts with the others, three alone, then it fails. The others succeed."""
    with Driver.run(folder, POISONED, poison=poisoned_key(), victim=victim) as driver:
        assert driver.end() == 1, driver.said
        tally.add(f"trial kills its {victim}", "coarse")
        assert f"1 trial failed; for the reasons: fedsweep status {folder}" in driver.said
        assert driver.left_behind() == []
    rows, _ = chaos.ledger(folder)
    states = {row.trial.hyperparameters["learning_rate"]: row.state for row in rows.values() if row.trial.rounds == 10}
    assert states == {0.01: "failed", 1: "done", 3: "done", 2: "done"}
    with Driver(folder, "status", str(folder), "--json") as driver:
        assert driver.end() == 0
        status = json.loads(driver.said)
    assert list(status["failed"]) == [poisoned_key()]
    assert "actor" in status["failed"][poisoned_key()].lower(), "the reason is Ray's"
    assert [retry["trials"] for retry in status["retries"]] == [3, 3, 3, 1, 1, 1]


def poisoned_key() -> str:
    from orchestrator.study.cells import PreparedStudy

    cell = PreparedStudy.prepare(parse(POISONED, "poisoned.yaml", Path.cwd())).cells[0]
    return trial_of(cell, "coarse", cell.space.grid(cell.space.coarse)[0]).key


@pytest.mark.chaos
def test_a_device_without_enough_memory(folder, undisturbed, tally):
    """Packs are split until they fit; no trial fails, and no retry is counted."""
    with Driver.run(folder, chaos.study(), memory_for=2) as driver:
        finished(driver, undisturbed)
    tally.add("out of memory", "coarse")
    assert "2 of 4 trials fit into the device's memory: packs are made smaller" in chaos.log(folder)
    assert chaos.retries(folder) == []


# ---- between runs


@pytest.mark.chaos
def test_a_study_that_is_edited_between_runs(folder, tmp_path, tally):
    """After a kill. What would change results is refused; what makes the study grow is run, and leaves what a study
    that was so from the start leaves; `resume` goes on with the study as it was last run."""
    with Driver.run(folder, chaos.study()) as driver:
        driver.reach(IN_COARSE)
        kill(driver)
    with Driver.run(folder, chaos.study().replace("clip: 2", "clip: 3")) as driver:
        assert driver.end() == 2
        assert "choose another" in driver.said
    tally.add("study edited, refused", "coarse")
    grown = chaos.study().replace("confirm: [42, 7]", "confirm: [42, 7, 3]")
    with Driver.run(folder, grown) as driver:
        driver.reach(IN_FINE)
        kill(driver)
    tally.add("study edited, grown", "fine")
    with Driver.resume(folder) as driver:
        assert driver.end() == 0
    with Driver.run(tmp_path / "from the start", grown) as driver:
        assert driver.end() == 0
    assert Left.of(folder) == Left.of(tmp_path / "from the start")


@pytest.mark.chaos
def test_a_clock_that_jumps_back(folder, undisturbed, tally):
    """By a day, in the driver and in all workers; and again before the study is resumed."""
    first = "import saboteur; saboteur.turn_back_the_clock({})"
    with Driver.run(
        folder, chaos.study(), first=first.format(86400), clock_back_s=86400, checkpoint_every_s=0.2
    ) as driver:
        assert driver.strike("server", IN_COARSE)
        driver.reach(IN_FINE)
        tally.add("clock jumps back", "fine")
        kill(driver)
    with Driver.resume(folder, first=first.format(2 * 86400), clock_back_s=2 * 86400) as driver:
        finished(driver, undisturbed)


# ---- nothing is left behind


STUDIES_IN_A_ROW = """\
import gc, json, os, sys, threading
from pathlib import Path
from orchestrator.execution import study_run
from orchestrator.execution.progress import View
from orchestrator.study.reading import parse

def open_files():
    # Ray's client keeps some sockets of a Ray that has ended, which the kernel no longer lists
    kinds = ("tcp", "tcp6", "udp", "udp6", "unix", "netlink")
    there = [file for kind in kinds if (file := Path("/proc/net", kind)).is_file()]
    listed = {word for file in there for word in file.read_text().split()}
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass  # the folder that was just read
    return [file for file in found if not file.startswith("socket:") or file[8:-1] in listed]

text, folder = sys.argv[1], Path(sys.argv[2])
for number in range(int(sys.argv[3])):
    study_run.run(parse(text, "study.yaml", Path.cwd()), text, folder / str(number), View())
    gc.collect()
    memory = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    print(json.dumps([int(memory.split()[1]) / 1024, len(open_files()), threading.active_count()]), flush=True)
"""


@pytest.mark.chaos
def test_twenty_studies_in_a_row_in_one_process(tmp_path, tally):
    """Each with its own Ray. The first ones fill caches; after that nothing may grow."""
    command = [sys.executable, "-c", STUDIES_IN_A_ROW, POISONED, str(tmp_path), "20"]
    ran = subprocess.run(command, env=chaos.ENVIRONMENT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert ran.returncode == 0
    memory, files, threads = zip(
        *(json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")), strict=True
    )
    print(f"MiB after each of 20 studies: {[round(m) for m in memory]}; open files {files}; threads {threads}")
    assert memory[19] - memory[4] < 15, memory
    assert files[19] <= files[4]
    assert threads[19] == threads[4]
