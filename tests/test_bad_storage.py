"""Storage that hangs, fills up, is read-only or changes what it holds: nothing that was finished is lost, and the
results are those of an undisturbed run."""

import contextlib
import os
import re
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import chaos
import fsspec
import pytest
from chaos import Driver, Left, session
from fsspec import AbstractFileSystem
from handmade_rows import HAS_KEY
from moto.server import ThreadedMotoServer

from orchestrator.results.locations import LEDGER
from orchestrator.results.remote_ledger import RemoteLedger
from orchestrator.results.remote_lock import RemoteLock

pytestmark = [pytest.mark.ray, pytest.mark.chaos]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Left:
    return chaos.run_alone(tmp_path_factory.mktemp("undisturbed") / "results", chaos.study())


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "results"


def test_a_storage_that_hangs_delays_no_pack(folder, undisturbed, tally):
    """Every checkpoint takes a minute to write."""
    with Driver.run(folder, chaos.study(), checkpoint_every_s=0, storage_hangs_s=60.0) as driver:
        assert driver.end() == 0, driver.said
    tally.add("storage of checkpoints hangs", "coarse")
    assert Left.of(folder) == undisturbed
    took = [float(seconds) for seconds in re.findall(r"trials ended after ([\d.]+) s", chaos.log(folder))]
    assert len(took) > 5
    assert max(took) < 60


def test_memory_limits_are_remembered(folder, undisturbed, tally):
    """The driver dies after a pack did not fit; the next one makes no pack of that size."""
    with Driver.run(folder, chaos.study(), memory_for=2) as driver:
        driver.wait_until(lambda: "packs are made smaller" in chaos.log(folder), "a pack did not fit")
        driver.process.kill()
        driver.process.wait()
    tally.add("out of memory, driver killed", chaos.current_stage(folder))
    with Driver.resume(folder, memory_for=2) as driver:
        assert driver.end() == 0, driver.said
    assert Left.of(folder) == undisturbed
    assert chaos.log(folder).count("pack of 4 trials starts: dp-scaffold") == 1, "in the first run only"


HURRIED = """\
import time
from orchestrator.results import locations, remote_lock
remote_lock.EXPIRES_S, locations.HEARTBEAT_S = 8.0, 0.5
from orchestrator.results.remote_ledger import RemoteLedger
upload = RemoteLedger.upload
def slow(self, *arguments):
    print("uploading", flush=True)
    time.sleep({})
    upload(self, *arguments)
RemoteLedger.upload = slow
"""


def test_an_upload_that_takes_longer_than_the_lock_is_valid(tmp_path, undisturbed, tally):
    """A second driver is refused all the while, and the first leaves what an undisturbed run leaves."""
    shared = tmp_path / "shared"
    url = f"file://{shared}"
    study = tmp_path / "study.yaml"
    study.write_text(chaos.study())
    command = ("run", str(study), "--results", url)
    with Driver(shared, *command, first=HURRIED.format(16)) as driver:
        driver.wait_until(lambda: "uploading" in driver.said, "an upload has begun")
        with Driver(tmp_path / "second", *command, first=HURRIED.format(0)) as second:
            assert second.end() == 2
            assert f"results folder {url} is in use by process {driver.process.pid} on " in second.said
        tally.add("upload longer than the lock", "coarse")
        assert driver.end() == 0, driver.said
    assert Left.of(shared) == undisturbed


def test_a_driver_whose_ray_has_died_leaves_no_lock_at_its_url(tmp_path, undisturbed, tally):
    """The same command continues at once, and no working copy is left."""
    shared, study = tmp_path / "shared", tmp_path / "study.yaml"
    study.write_text(chaos.study())
    command = ("run", str(study), "--results", f"file://{shared}")
    with Driver(shared, *command) as driver:
        driver.wait_until(lambda: (shared / LEDGER).exists(), "a pack was recorded")
        processes = session(driver.process.pid).items()
        (victim,) = [pid for pid, title in processes if title.partition(" ")[0].endswith("/raylet")]
        os.kill(victim, signal.SIGKILL)
        tally.add("local Ray, raylet, results at a URL", "coarse")
        assert driver.end() == 2, driver.said
        assert driver.said.endswith("no finished trial is lost, and the same command continues.\n")
        assert not list(driver.temporary.glob("fedsweep-*/ledger.sqlite"))
    with Driver(shared, *command) as driver:
        assert driver.end() == 0, driver.said
    assert Left.of(shared) == undisturbed


@pytest.fixture
def bucket(monkeypatch) -> Iterator[tuple[str, AbstractFileSystem]]:
    """A URL on a local S3 server, for processes too, and its file system."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (("KEY", "key"), ("SECRET", "secret"), ("ENDPOINT_URL", f"http://{host}:{port}")):
        monkeypatch.setitem(chaos.ENVIRONMENT, f"FSSPEC_S3_{name}", value)
    options = {"endpoint_url": f"http://{host}:{port}", "key": "key", "secret": "secret"}
    files = fsspec.filesystem("s3", use_listings_cache=False, **options)
    files.mkdir("bucket")
    yield "s3://bucket/results", files
    server.stop()


def test_two_drivers_at_one_s3_url(bucket, tmp_path, undisturbed, tally):
    """Of two that start at once, one is refused. The other is killed; of two that start when its lock has expired, one
    takes over, and leaves what an undisturbed run leaves."""
    url, files = bucket
    study = tmp_path / "study.yaml"
    study.write_text(chaos.study())
    command = ("run", str(study), "--results", url, "--backend", "local")

    def start_two(drivers: contextlib.ExitStack, number: int) -> Driver:
        """The one that runs; the other is refused."""
        pair = [Driver(tmp_path / f"{number} {n}", *command, first=HURRIED.format(4)) for n in range(2)]
        for driver in pair:
            drivers.enter_context(driver)
        chaos.wait_until(lambda: not all(driver.alive for driver in pair), "one of them ends")
        refused, runs = sorted(pair, key=lambda driver: driver.alive)
        assert refused.end() == 2, refused.said
        assert re.search(rf"results folder {url} is in use by process {runs.process.pid} on ", refused.said)
        tally.add("two drivers at an S3 URL", "coarse")
        return runs

    with contextlib.ExitStack() as drivers:
        first = start_two(drivers, 1)
        first.wait_until(lambda: files.exists(f"{url}/{LEDGER}"), "a pack was uploaded")
        first.process.kill()
        first.process.wait()
        lock = RemoteLock(files, "bucket/results", url)
        chaos.wait_until(lambda: lock.holder().age > 8, "its lock has expired")
        second = start_two(drivers, 2)
        assert second.end() == 0, second.said
    assert not files.exists(f"{url}/remote.lock")
    left = tmp_path / "left"
    files.get(f"{url}/tables", str(left / "tables"), recursive=True)
    files.get(f"{url}/best.yaml", str(left / "best.yaml"))
    RemoteLedger(files, "bucket/results").download(left)
    assert Left.of(left) == undisturbed


MOMENTS = {
    "rows are copied": ("orchestrator.results.ledger:Ledger", "copy_rows"),
    "trials are counted": ("orchestrator.results.ledger:Ledger", "recount"),
    "tables are written": ("orchestrator.execution.merging", "write_tables"),
}
HALTED = """\
import pkgutil, time
owner = pkgutil.resolve_name({!r})
original = getattr(owner, {!r})
def halted(*arguments, **named):
    result = original(*arguments, **named)
    print("here", flush=True)
    time.sleep(1000)
    return result
setattr(owner, {!r}, halted)
"""


def test_a_merge_that_is_killed(tmp_path, undisturbed, tally):
    """Three times, in the middle of its work; the same command then merges everything."""
    parts = [str(tmp_path / f"part {k}") for k in (1, 2)]
    for k, part in enumerate(parts, 1):
        with Driver.run(Path(part), chaos.study(), "--backend", "local", "--shard", f"{k}/2") as driver:
            assert driver.end() == 0, driver.said
    merged = tmp_path / "merged"
    command = ("merge", *parts, "--results", str(merged))
    for moment, (owner, name) in MOMENTS.items():
        with Driver(merged, *command, first=HALTED.format(owner, name, name)) as driver:
            driver.wait_until(lambda driver=driver: "here" in driver.said, moment)
            driver.process.kill()
            driver.process.wait()
        tally.add(f"merge killed, {moment}", "elsewhere")
    with Driver(merged, *command) as driver:
        assert driver.end() == 0, driver.said
    assert Left.of(merged) == undisturbed


def test_a_folder_that_is_read_only(tmp_path, undisturbed, tally):
    """As on an archive: what only reads works; what would write names another place or says so, with exit code 2."""
    with chaos.small_disk_on(tmp_path / "disk", size="20m") as disk:
        folder, seen = disk.path / "results", disk.seen / "results"
        there = {"wrapper": disk.wrapper, "seen": seen}
        with Driver.run(folder, chaos.study(), "--backend", "local", **there) as driver:
            assert driver.end() == 0, driver.said
        disk.allow_writing(False)
        tally.add("results folder is read-only", "elsewhere")
        for command in ("status", "best", "check"):
            with Driver(folder, command, str(folder), **there) as driver:
                assert driver.end() == 0, driver.said
        for command in ("report", "export", "tables", "resume"):
            with Driver(folder, command, str(folder), **there) as driver:
                assert driver.end() == 2, driver.said
                assert driver.said.startswith("fedsweep: ")
                assert "read-only" in driver.said.lower()
                assert "Traceback" not in driver.said
        for command, option, place in (("report", "--output", "report.html"), ("export", "--out", "export")):
            with Driver(folder, command, str(folder), option, str(tmp_path / place), **there) as driver:
                assert driver.end() == 0, driver.said
            assert (tmp_path / place).exists()
        disk.allow_writing(True)
        with Driver.resume(folder, **there) as driver:
            assert driver.end() == 0, driver.said
        assert Left.of(shutil.copytree(seen, tmp_path / "after")) == undisturbed


def test_a_digit_of_the_ledger_changes(folder, undisturbed, tally, fedsweep):
    """The row is named, forgotten by `check --repair` and computed again."""
    chaos.run_alone(folder, chaos.study())
    tables = {file: file.read_bytes() for file in (folder / "tables").iterdir()}
    with sqlite3.connect(folder / "ledger.sqlite") as connection:
        done = "SELECT key, epsilon_local FROM trials JOIN trial_keys USING (number) WHERE state = 'done'"
        key, before = connection.execute(done).fetchone()
        connection.execute(f"UPDATE trials SET epsilon_local = ? WHERE {HAS_KEY}", (before + 1, key))
    connection.close()
    tally.add("digit of the ledger changes", "elsewhere")
    for command in ("tables", "resume"):
        code, _, err = fedsweep(command, folder)
        assert code == 2
        assert f"the row of trial '{key}' does not match its checksum" in err
    assert {file: file.read_bytes() for file in tables} == tables
    assert fedsweep("check", folder, "--repair")[0] == 0
    assert chaos.run_alone(folder, chaos.study()) == undisturbed
