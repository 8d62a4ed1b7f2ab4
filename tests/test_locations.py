"""Results at a URL: a working copy here, whole snapshots there, one driver at a time."""

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer
from nodes import wait_for

from orchestrator.execution import study_run
from orchestrator.execution.progress import View
from orchestrator.results import locations
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import LEDGER, LOCK, read_text, results_location
from orchestrator.study.reading import parse
from orchestrator.study.settings import ResourceSettings
from trainables.errors import UserError

STUDY = """\
name: far
data: [{source: "synthetic-frozen:400,100,6,3", label: tiny}]
partitions: [iid]
clients: 2
methods:
  - dp-fedgd: {coarse: {learning_rate: [0.1, 0.3, 1]}, fine: {learning_rate: [0.2]}}
epsilons: [40]
rounds: {coarse: 4, fine: 4, confirm: 4}
seeds: {search: 42, contest: [], confirm: [42]}
search: {refine: table}
evaluate_every: 2
resources: {gpus_per_host: 0, hosts: 1, lanes_per_pack: 1}
"""
TRIALS = 3 + 1 + 1


@pytest.fixture(scope="module")
def s3():
    """A server that speaks S3, with one bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    given = {"endpoint_url": f"http://{host}:{port}", "key": "nobody", "secret": "nothing"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", given)  # as FSSPEC_S3_KEY and its like; it travels to the nodes
        files = fsspec.filesystem("s3", use_listings_cache=False)
        files.mkdir("bucket")
        yield files
    server.stop()


@pytest.fixture(params=["s3", "file"])
def url(request, tmp_path) -> str:
    """An empty folder, on object storage and on a shared file system."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://bucket/{tmp_path.name}"
    return f"file://{tmp_path}/shared/folder"


def files_at(url: str) -> dict[str, bytes]:
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    found = {}
    for name in files.find(root):
        with contextlib.suppress(FileNotFoundError):  # which has just got its final name
            found[name.removeprefix(root).lstrip("/")] = files.cat_file(name)
    return found


def ended(url: str, folder: Path) -> int:
    """How many trials the ledger at a URL holds; it is a whole one."""
    ledger = files_at(url).get(LEDGER)
    if ledger is None:
        return 0
    file = folder / "looked-at.sqlite"
    file.write_bytes(ledger)
    with contextlib.closing(sqlite3.connect(file)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return db.execute("SELECT count(*) FROM trials").fetchone()[0]


def run(where, view: View | None = None, resources: ResourceSettings | None = None) -> study_run.Finished:
    return study_run.run(parse(STUDY, "far.yaml", Path.cwd()), STUDY, where, view or View(), resources=resources)


# ---- a study at a URL


class Watching(View):
    """Sees the ledger arrive after every pack, and asks to stop after some trials."""

    def __init__(self, url: str, folder: Path, stop_after: int) -> None:
        super().__init__()
        self.url, self.folder, self.stop_after = url, folder, stop_after
        self.before = self.sent = 0

    def starting(self, sweep):
        self.before = self.sent = len(sweep.outcomes)

    def changed(self, running):
        recorded = len(running.sweep.outcomes)
        if recorded > self.sent:
            wait_for(lambda: ended(self.url, self.folder) >= recorded, "the ledger was sent")
            self.sent = recorded
            assert results_location(self.url).lock_holder() == f"process {os.getpid()} on {socket.gethostname()}"
        running.stopping = recorded >= self.stop_after


@pytest.mark.ray
@pytest.mark.nodes
def test_a_study_at_a_url(local_ray, s3, tmp_path, fedsweep):
    """A driver runs two packs and is gone, with its working copy; another one goes on, with other resources. They leave
    there what a run leaves in a folder."""
    url, local = f"s3://bucket/{tmp_path.name}", tmp_path / "local"
    first, second = (Watching(url, tmp_path, stop_after) for stop_after in (2, TRIALS))
    assert not run(url, first).complete
    code, out, _ = fedsweep("status", url, "--json")
    assert (code, json.loads(out)["finished"], json.loads(out)["running"]) == (0, False, None)
    finished = run(url, second, ResourceSettings(gpus_per_host=0, hosts=2))
    assert finished.complete
    assert (first.before, second.before, second.sent) == (0, first.sent, TRIALS)
    assert 2 <= first.sent < TRIALS, "with what was in flight"
    assert run(local).complete

    found = files_at(url)
    here = {path.relative_to(local).as_posix(): path for path in local.rglob("*") if path.is_file()}
    assert set(found) == set(here) - {"ledger.lock"}
    for name, path in here.items():
        if name.startswith("tables/") or name in ("best.yaml", "study.yaml"):
            assert found[name] == path.read_bytes(), name
    assert found["fedsweep.log"].count(b"trials ended") == TRIALS, "of both drivers"
    assert {f"{url}/{name}" for name in found if name.startswith("tables/")} <= set(finished.tables)

    code, out, _ = fedsweep("best", url, "--json")
    assert (code, len(json.loads(out))) == (0, 1)
    assert read_text(f"{url}/best.yaml") == (local / "best.yaml").read_text(), "what train --from reads"
    code, out, _ = fedsweep("resume", url)
    assert (code, out.strip()) == (0, found["tables/README.md"].decode().strip())
    s3.rm_file(f"bucket/{tmp_path.name}/tables/accuracy.md")
    s3.pipe_file(f"bucket/{tmp_path.name}/tables/outdated.md", b"of a smaller study")
    code, out, _ = fedsweep("tables", url)
    assert (code, f"{url}/tables/accuracy.md" in out.splitlines()) == (0, True)
    assert {name: text for name, text in files_at(url).items() if name.startswith("tables/")} == {
        name: text for name, text in found.items() if name.startswith("tables/")
    }


def test_checkpoints_go_to_the_url_too(url):
    """So every node can reach them, whatever file systems it has; and they are cleared away."""
    packs = results_location(url).checkpoints
    assert packs.filesystem is not None
    assert not packs.within_reach()
    packs.filesystem.pipe_file(f"{packs.path}/left/behind", b"x")
    assert packs.within_reach()
    packs.clear()
    assert not packs.within_reach()
    packs.clear()


def test_checkpoints_that_a_node_cannot_reach(url, monkeypatch):
    packs = results_location(url).checkpoints
    monkeypatch.setattr(packs.filesystem, "exists", broken)
    assert not packs.within_reach()
    packs.clear()


# ---- one driver at a time


@pytest.fixture
def soon(monkeypatch):
    """Signs of life come fast."""
    monkeypatch.setattr(locations, "HEARTBEAT_S", 0.05)


def test_a_second_driver_is_refused_while_the_first_lives(url):
    refused = pytest.raises(UserError, match=rf"^result folder {url} is in use by process \d+ on")
    with results_location(url).open_for_writing(), refused, results_location(url).open_for_writing():
        pytest.fail("there are two")
    with results_location(url).open_for_writing():
        pass  # it was free again at once


def lock_of(url: str) -> dict:
    return json.loads(files_at(url)[LOCK])


def test_a_living_driver_says_so(url, soon):
    with results_location(url).open_for_writing():
        first = lock_of(url)["alive"]
        wait_for(lambda: lock_of(url)["alive"] > first, "a sign of life")
        assert results_location(url).lock_holder()
    assert results_location(url).lock_holder() is None


def test_a_dead_driver_blocks_nobody_for_ever(url, monkeypatch):
    """It left its lock behind, which counts until its time is over."""
    first = results_location(url)
    first._take_lock()
    with pytest.raises(UserError, match="is in use"), results_location(url).open_for_writing():
        pass
    monkeypatch.setattr(locations, "LOCK_EXPIRES_S", 0.0)
    assert results_location(url).lock_holder() is None
    with results_location(url).open_for_writing():
        pass


def test_who_was_replaced_stops_and_sends_nothing_more(url):
    """As after a machine has slept for long."""
    first, second = results_location(url), results_location(url)

    def drive() -> None:
        with first.open_for_writing():
            with Ledger.write(first.folder):
                pass
            files, root = fsspec.core.url_to_fs(url)
            files.pipe_file(f"{root}/{LOCK}", second._sign())
            first.notify_recorded(1)
            wait_for(lambda: first._lost, "it was noticed")
            first.notify_recorded(2)

    with pytest.raises(UserError, match=f"^result folder {url} was taken over by process"):
        drive()
    assert LEDGER not in files_at(url)
    assert lock_of(url)["token"] == second._token
    assert not first.folder.exists()


# ---- what goes wrong


def broken(*arguments, **named):
    raise OSError("the network is down")


def test_results_that_cannot_be_sent_are_kept_and_named(url, monkeypatch):
    where = results_location(url)

    def drive() -> None:
        with where.open_for_writing(), Ledger.write(where.folder):
            monkeypatch.setattr(where._files, "put_file", broken)

    with pytest.raises(UserError, match=r"could not be sent to .*the network is down") as caught:
        drive()
    assert f"they are in {where.folder}, where 'fedsweep resume {where.folder}' goes on" in str(caught.value)
    assert (where.folder / LEDGER).is_file()
    shutil.rmtree(where.folder)


def test_a_failure_on_the_way_is_tried_again(url, monkeypatch, soon):
    where = results_location(url)
    with where.open_for_writing():
        send, failed = where._files.put_file, threading.Event()

        def flaky(*arguments, **named):
            if not failed.is_set():
                failed.set()
                broken()
            return send(*arguments, **named)

        monkeypatch.setattr(where._files, "put_file", flaky)
        with Ledger.write(where.folder):
            where.notify_recorded(1)
            wait_for(lambda: LEDGER in files_at(url), "the ledger was there")
        assert failed.is_set()


def test_a_ledger_that_cannot_be_fetched_is_left_alone(url, monkeypatch):
    """Half a download must never go back over the whole one."""
    first = results_location(url)
    with first.open_for_writing(), Ledger.write(first.folder):
        pass
    before = files_at(url)[LEDGER]
    second = results_location(url)

    def half(source, target, **named):
        Path(target).write_bytes(before[:1000])
        broken()

    monkeypatch.setattr(second._files, "get_file", half)
    refused = pytest.raises(UserError, match=f"^the results at {url} cannot be read: the network is down$")
    with refused, second.open_for_writing():
        pytest.fail("there is nothing to work on")
    assert files_at(url) == {LEDGER: before}
    assert not second.folder.exists()


def test_a_bucket_that_is_not_there_is_not_made(s3, fedsweep):
    code, _, err = fedsweep("status", "s3://nowhere/folder")
    assert (code, err.count("\n")) == (2, 1), err
    code, _, err = fedsweep("run", "quickstart", "--results", "s3://nowhere/folder")
    assert code == 2
    assert err.startswith("fedsweep: the results at s3://nowhere/folder cannot be written: ")
    assert not s3.exists("nowhere")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense://x/y", "nonsense://x/y cannot be opened: Protocol not known: nonsense."),
        ("s3://", "s3:// names no folder."),
    ],
)
def test_bad_urls(fedsweep, url, said):
    code, _, err = fedsweep("status", url)
    assert (code, err) == (2, f"fedsweep: {said}\n")


def test_a_package_that_is_not_installed_is_named():
    """As for a user without the extra: s3fs cannot be imported."""
    program = "import sys; sys.modules['s3fs'] = None; sys.argv[1:] = ['status', 's3://b/f']; "
    program += "from orchestrator.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == ("fedsweep: s3://b/f needs a package that is not installed: pip install 'fedsweep[s3]'.\n")


def test_a_lock_that_is_just_being_renewed_is_read_again(tmp_path, monkeypatch):
    """A file is empty for a moment while it is written: that does not mean that nobody holds it."""
    with results_location(f"file://{tmp_path}/results").open_for_writing() as held:
        whole = held._files.cat_file
        answers = iter([b" ", b'{"holder": "pro'])
        monkeypatch.setattr(type(held._files), "cat_file", lambda self, path: next(answers, None) or whole(path))
        assert held.lock_holder() == held._me
