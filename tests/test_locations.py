"""Results at a URL: a local working copy, complete uploads, one driver at a time."""

import contextlib
import errno
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer
from nodes import wait_for

from orchestrator.execution import study_run
from orchestrator.execution.progress import View
from orchestrator.results import locations, remote_lock
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import LEDGER, LOCK, LOG, STOP_FILES, read_text, results_location
from orchestrator.results.remote_ledger import RemoteLedger
from orchestrator.results.remote_lock import LockLostError, RemoteLock
from orchestrator.study.reading import parse
from orchestrator.study.settings.resources import ResourceSettings
from trainables import urls
from trainables.errors import UserError

STUDY = """\
name: far
data: [{source: "synthetic-frozen:400,100,6,3", label: tiny}]
partitions: [iid]
clients: 2
methods:
  - dp-fedgd: {coarse: {learning_rate: [0.1, 0.3, 1]}, fine: {learning_rate: [0.2]}}
epsilons: [40]
defaults: paper
rounds: {coarse: 4, fine: 4, confirm: 4}
seeds: {search: 42, contest: [], confirm: [42]}
search: {refine: table}
evaluate_every: 2
resources: {gpus_per_host: 0, hosts: 1, lanes_per_pack: 1}
"""
TRIALS = 3 + 1 + 1


@pytest.fixture(scope="module")
def s3():
    """A local S3 server with one bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "key", "secret": "secret"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", options)  # like FSSPEC_S3_KEY; Ray workers inherit it
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
    contents = {}
    for name in files.find(root):
        with contextlib.suppress(FileNotFoundError):  # renamed since it was listed
            contents[name.removeprefix(root).lstrip("/")] = files.cat_file(name)
    return contents


def trials_at(url: str, folder: Path) -> int:
    """The number of trials in the ledger at a URL, which must be complete."""
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        RemoteLedger(files, root).download(Path(name))
        if not (Path(name) / LEDGER).exists():
            return 0
        with contextlib.closing(sqlite3.connect(Path(name) / LEDGER)) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            return db.execute("SELECT count(*) FROM trials").fetchone()[0]


def run(where, view: View | None = None, resources: ResourceSettings | None = None) -> study_run.Finished:
    return study_run.run(parse(STUDY, "far.yaml", Path.cwd()), STUDY, where, view or View(), resources=resources)


# ---- a study at a URL


class Watching(View):
    """Waits for the ledger's upload after every pack, and stops after some trials."""

    def __init__(self, url: str, folder: Path, stop_after: int) -> None:
        super().__init__()
        self.url, self.folder, self.stop_after = url, folder, stop_after
        self.before = self.uploaded = 0

    def starting(self, sweep):
        self.before = self.uploaded = len(sweep.outcomes)

    def changed(self, running):
        recorded = len(running.sweep.outcomes)
        if recorded > self.uploaded:
            wait_for(lambda: trials_at(self.url, self.folder) >= recorded, "the ledger was uploaded")
            self.uploaded = recorded
            assert results_location(self.url).lock_holder() == f"process {os.getpid()} on {socket.gethostname()}"
        running.stopping = recorded >= self.stop_after


@pytest.mark.ray
@pytest.mark.nodes
def test_a_study_at_a_url(local_ray, s3, tmp_path, fedsweep):
    """A driver runs two packs and exits; another one continues with other resources. Together they leave at the URL
    what one run leaves in a local folder."""
    url, local = f"s3://bucket/{tmp_path.name}", tmp_path / "local"
    first, second = (Watching(url, tmp_path, stop_after) for stop_after in (2, TRIALS))
    assert not run(url, first).complete
    code, out, _ = fedsweep("status", url, "--json")
    assert (code, json.loads(out)["finished"], json.loads(out)["running"]) == (0, False, None)
    finished = run(url, second, ResourceSettings(gpus_per_host=0, hosts=2))
    assert finished.complete
    assert (first.before, second.before, second.uploaded) == (0, first.uploaded, TRIALS)
    assert 2 <= first.uploaded < TRIALS, "including the packs in flight"
    assert run(local).complete

    remote = files_at(url)
    here = {path.relative_to(local).as_posix(): path for path in local.rglob("*") if path.is_file()}
    assert set(remote) == set(here) - {"ledger.lock"}
    for name, path in here.items():
        if name.startswith("tables/") or name in ("best.yaml", "study.yaml"):
            assert remote[name] == path.read_bytes(), name
    assert remote["fedsweep.log"].count(b"trials ended") == TRIALS, "the log of both drivers"
    assert {f"{url}/{name}" for name in remote if name.startswith("tables/")} <= set(finished.tables)

    code, out, _ = fedsweep("best", url, "--json")
    assert (code, len(json.loads(out))) == (0, 1)
    assert read_text(f"{url}/best.yaml") == (local / "best.yaml").read_text(), "the file that train --from reads"
    code, out, _ = fedsweep("resume", url)
    assert (code, out.strip()) == (0, remote["tables/README.md"].decode().strip())
    s3.rm_file(f"bucket/{tmp_path.name}/tables/accuracy.md")
    s3.pipe_file(f"bucket/{tmp_path.name}/tables/outdated.md", b"of a smaller study")
    code, out, _ = fedsweep("tables", url)
    assert (code, f"{url}/tables/accuracy.md" in out.splitlines()) == (0, True)
    assert {name: text for name, text in files_at(url).items() if name.startswith("tables/")} == {
        name: text for name, text in remote.items() if name.startswith("tables/")
    }


def test_checkpoints_are_stored_at_the_url_too(url):
    """Every node can reach them there; `remove_all` removes them."""
    checkpoints = results_location(url).checkpoints
    assert checkpoints.filesystem is not None
    checkpoints.filesystem.pipe_file(f"{checkpoints.path}/left/behind", b"x")
    checkpoints.remove_all()
    assert not checkpoints.filesystem.exists(checkpoints.path)
    checkpoints.remove_all()


def test_checkpoints_that_a_node_cannot_reach(url, monkeypatch):
    checkpoints = results_location(url).checkpoints
    monkeypatch.setattr(checkpoints.filesystem, "exists", broken)
    checkpoints.remove_all()


# ---- one driver at a time


@pytest.fixture
def fast_heartbeat(monkeypatch):
    monkeypatch.setattr(locations, "HEARTBEAT_S", 0.05)


def test_a_second_driver_is_refused_while_the_first_is_alive(url):
    refused = pytest.raises(UserError, match=rf"^results folder {url} is in use by process \d+ on")
    with results_location(url).open_for_writing(), refused, results_location(url).open_for_writing():
        pytest.fail("two drivers")
    with results_location(url).open_for_writing():
        pass  # released at once


def lock_of(url: str) -> dict:
    return json.loads(files_at(url)[LOCK])


def test_a_running_driver_renews_its_lock(url, fast_heartbeat):
    with results_location(url).open_for_writing():
        first = lock_of(url)["alive"]
        wait_for(lambda: lock_of(url)["alive"] > first, "a heartbeat")
        assert results_location(url).lock_holder()
    assert results_location(url).lock_holder() is None


def test_the_lock_of_a_dead_driver_expires(url, monkeypatch):
    results_location(url).lock.acquire()
    with pytest.raises(UserError, match="is in use"), results_location(url).open_for_writing():
        pass
    monkeypatch.setattr(remote_lock, "EXPIRES_S", 0.0)
    assert results_location(url).lock_holder() is None
    with results_location(url).open_for_writing():
        pass


@pytest.mark.parametrize("noticed_first", [False, True])
def test_a_replaced_driver_stops_and_uploads_nothing_more(url, noticed_first, monkeypatch, fast_heartbeat):
    """As after its machine was suspended. Rows that it had not uploaded are kept and named."""
    first, second = results_location(url), results_location(url)

    def drive() -> None:
        with first.open_for_writing():
            with Ledger.write(first.folder):
                pass
            with monkeypatch.context() as later:
                later.setattr(remote_lock, "EXPIRES_S", 0.0)
                second.lock.acquire()
            if not noticed_first:
                first.notify_recorded(1)
            wait_for(lambda: first._lock_lost, "the driver noticed")
            first.notify_recorded(2)

    with pytest.raises(UserError, match=f"^results folder {url} was taken over by process") as caught:
        drive()
    assert f"trials that were not uploaded are in {first.folder}, and 'fedsweep merge {url} " in str(caught.value)
    assert LEDGER not in files_at(url)
    assert lock_of(url)["token"] == second.lock.token
    assert (first.folder / LEDGER).exists()
    shutil.rmtree(first.folder)


def test_a_driver_that_ends_without_cleaning_up_lets_another_one_continue(url):
    """As after the local Ray has died: what is recorded is uploaded, and the lock released."""
    first = results_location(url)
    with first.open_for_writing():
        with Ledger.write(first.folder) as ledger:
            ledger.add_study("{}", "text")
            (first.folder / LOG).write_text("a line")
            first.notify_recorded(1)
            assert first.leave(30) == ""
        assert not first.folder.exists()
        assert not first._renewals.is_alive()
        assert files_at(url)[LOG] == b"a line"
        with results_location(url).open_for_writing() as second, Ledger.read(second.folder) as ledger:
            assert ledger.study() == ("{}", "text")


def test_a_driver_that_ends_without_its_storage_names_the_lock_and_its_folder(url, monkeypatch):
    first = results_location(url)
    with first.open_for_writing(), Ledger.write(first.folder), monkeypatch.context() as patch:
        patch.setattr(first.lock, "check", broken)
        left = first.leave(30)
        expected = f"the lock at {url} expires in 120 s; trials that were not uploaded are in {first.folder}, and "
        assert left.startswith(expected)
        assert first.folder.exists()


def test_a_long_upload_does_not_let_the_lock_expire(url, monkeypatch, fast_heartbeat):
    """The lock is renewed by another thread than the one that uploads."""
    where = results_location(url)
    with where.open_for_writing(), Ledger.write(where.folder):
        upload, renewals = where._files.put_file, []

        def slow(*arguments, **named):
            for _ in range(3):
                before = lock_of(url)["alive"]
                wait_for(lambda before=before: lock_of(url)["alive"] > before, "a renewal during the upload")
                renewals.append(1)
            return upload(*arguments, **named)

        monkeypatch.setattr(where._files, "put_file", slow)
        where.notify_recorded(1)
        wait_for(lambda: LEDGER in files_at(url), "the ledger was uploaded")
        assert len(renewals) >= 3
        monkeypatch.setattr(where._files, "put_file", upload)


def test_a_driver_that_loses_the_lock_during_an_upload_publishes_nothing(url, monkeypatch):
    first, second = results_location(url), results_location(url)

    def drive() -> None:
        with first.open_for_writing(), Ledger.write(first.folder):
            upload = first._files.put_file

            def suspended(*arguments, **named):
                upload(*arguments, **named)
                with monkeypatch.context() as later:
                    later.setattr(remote_lock, "EXPIRES_S", 0.0)
                    second.lock.acquire()

            monkeypatch.setattr(first._files, "put_file", suspended)
            first.notify_recorded(1)
            wait_for(lambda: first._lock_lost, "the driver noticed")

    with pytest.raises(UserError, match="was taken over by process"):
        drive()
    assert set(files_at(url)) == {LOCK, f"{LOCK}.{first.lock.token}"}, "no ledger and no part of one"
    second.lock.release()
    assert files_at(url) == {}, "its own lock only"
    with pytest.raises(UserError, match="was taken over by another driver, which has finished"):
        first.lock.renew()
    shutil.rmtree(first.folder)


def test_only_one_of_two_drivers_takes_over_an_expired_lock(url, monkeypatch):
    dead, one, two = (results_location(url).lock for _ in range(3))
    dead.acquire()
    monkeypatch.setattr(remote_lock, "EXPIRES_S", 0.0)
    read = one.holder()
    one.acquire()
    monkeypatch.setattr(two, "holder", lambda: read)  # it has looked before the other took over
    with pytest.raises(UserError, match="whose lock another driver has just taken over"):
        two.acquire()
    one.renew()
    assert lock_of(url)["token"] == one.token


def renew_while_another_takes_over(first: RemoteLock, then: Callable[[], None], monkeypatch) -> None:
    """The other driver takes over between the last look and the write."""
    first.acquire()
    first.renew()
    check = first.check

    def suspended() -> None:
        check()
        monkeypatch.setattr(first, "check", check)
        with monkeypatch.context() as later:
            later.setattr(remote_lock, "EXPIRES_S", 0.0)
            then()

    monkeypatch.setattr(first, "check", suspended)
    with pytest.raises((LockLostError, FileNotFoundError)):
        first.renew()
    with pytest.raises(LockLostError):
        first.renew()


def test_a_renewal_does_not_replace_the_lock_of_another_driver(url, monkeypatch):
    first, second = results_location(url).lock, results_location(url).lock
    renew_while_another_takes_over(first, second.acquire, monkeypatch)
    assert second.holder().token == second.token
    second.renew()


def test_a_renewal_does_not_bring_back_a_lock_after_another_driver_has_finished(s3, tmp_path, monkeypatch):
    """Only with conditional writes."""
    url = f"s3://bucket/{tmp_path.name}"
    first, second = results_location(url).lock, results_location(url).lock
    renew_while_another_takes_over(first, lambda: (second.acquire(), second.release()), monkeypatch)
    assert files_at(url) == {}


def test_a_renewal_whose_answer_was_lost_is_not_the_lock_of_another_driver(s3, tmp_path):
    lock = results_location(f"s3://bucket/{tmp_path.name}").lock
    lock.acquire()
    s3.pipe_file(lock._path, lock.content())  # as if sent twice
    with pytest.raises(OSError, match=r"pre-?condition"):
        lock.renew()
    lock.renew()
    lock.release()


def test_storage_without_conditional_writes(s3, tmp_path, monkeypatch):
    lock = results_location(f"s3://bucket/{tmp_path.name}").lock
    lock.acquire()
    write = lock._files.pipe_file

    def refuse(path, content, **options):
        if "IfMatch" in options:
            raise OSError(errno.ENOSYS, "not implemented")
        write(path, content)

    monkeypatch.setattr(lock._files, "pipe_file", refuse)
    with pytest.raises(OSError, match="not implemented"):
        lock.renew()
    lock.renew()


def test_a_lock_of_a_clock_that_is_ahead(url, monkeypatch):
    first, second = results_location(url).lock, results_location(url).lock
    now = remote_lock.time.time
    with monkeypatch.context() as ahead:
        ahead.setattr(remote_lock.time, "time", lambda: now() + 1000)
        first.acquire()
    sentence = (
        r"whose clock is (999|1000) s ahead of this machine's; if that process has died, the lock expires in 11\d\d s"
    )
    with pytest.raises(UserError, match=sentence):
        second.acquire()


# ---- stop requests


def test_a_stop_request_for_an_earlier_driver_is_discarded(url, fast_heartbeat):
    """The earlier driver ended before it saw the request: the next one must not stop because of it."""
    results_location(url).request_stop()
    with results_location(url).open_for_writing() as location:
        assert not set(STOP_FILES.values()) & set(files_at(url))
        assert not location.stop_requested()
        results_location(url).request_stop()
        wait_for(location.stop_requested, "the request arrived")


@pytest.mark.parametrize("remote", [False, True])
def test_a_stop_request_counts_before_anything_is_written_to_it(tmp_path, remote, fast_heartbeat):
    """Where files are not written atomically, the driver may find it empty."""
    where = f"file://{tmp_path}/results" if remote else str(tmp_path / "results")
    (tmp_path / "results").mkdir()
    with results_location(where).open_for_writing() as location:
        (tmp_path / "results" / STOP_FILES["now"]).touch()
        wait_for(lambda: location.stop_requested() == "now", "the request arrived")


def test_a_stop_request_that_arrives_while_another_is_taken(url, monkeypatch, fast_heartbeat):
    with results_location(url).open_for_writing() as location:
        remove = location._files.rm_file

        def remove_later(path):
            if path.endswith(STOP_FILES["after packs"]):
                results_location(url).request_stop(now=True)
            remove(path)

        with monkeypatch.context() as patch:
            patch.setattr(location._files, "rm_file", remove_later)
            results_location(url).request_stop()
            wait_for(lambda: location.stop_requested() == "now", "both requests arrived")
        results_location(url).request_stop()
        wait_for(lambda: not set(STOP_FILES.values()) & set(files_at(url)), "the third request was taken")
        assert location.stop_requested() == "now"


@pytest.mark.parametrize("step", ["cat_file", "rm_file"])
def test_a_stop_request_counts_although_the_storage_fails_next(url, step, monkeypatch, fast_heartbeat):
    """While the other request is read, or when this one is deleted."""
    failing = STOP_FILES["after packs" if step == "cat_file" else "now"]
    with results_location(url).open_for_writing() as location:
        real = getattr(location._files, step)

        def sometimes(path, *arguments, **named):
            if path.endswith(failing):
                raise OSError("the network is down")
            return real(path, *arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(location._files, step, sometimes)
            results_location(url).request_stop(now=True)
            wait_for(lambda: location.stop_requested() == "now", "the request arrived")


# ---- failures


def broken(*arguments, **named):
    raise OSError("the network is down")


def test_results_that_cannot_be_uploaded_are_kept_and_named(url, monkeypatch):
    where = results_location(url)

    def drive() -> None:
        with where.open_for_writing(), Ledger.write(where.folder):
            monkeypatch.setattr(where._files, "put_file", broken)

    with pytest.raises(UserError, match=r"could not be uploaded to .*the network is down") as caught:
        drive()
    assert f"they are in {where.folder}, and 'fedsweep resume {where.folder}' continues there" in str(caught.value)
    assert (where.folder / LEDGER).is_file()
    shutil.rmtree(where.folder)


def test_a_failed_upload_is_retried(url, monkeypatch, fast_heartbeat):
    where = results_location(url)
    with where.open_for_writing():
        upload, failed = where._files.put_file, threading.Event()

        def flaky(*arguments, **named):
            if not failed.is_set():
                failed.set()
                broken()
            return upload(*arguments, **named)

        monkeypatch.setattr(where._files, "put_file", flaky)
        with Ledger.write(where.folder):
            where.notify_recorded(1)
            wait_for(lambda: LEDGER in files_at(url), "the ledger was uploaded")
        assert failed.is_set()


def test_a_ledger_that_cannot_be_downloaded_is_not_overwritten(url, monkeypatch):
    """A partial download must never replace the complete ledger."""
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
        pytest.fail("opened without a ledger")
    assert files_at(url) == {LEDGER: before}
    assert not second.folder.exists()


def test_a_missing_bucket_is_not_created(s3, fedsweep):
    code, _, err = fedsweep("status", "s3://nowhere/folder")
    assert (code, err.count("\n")) == (2, 1), err
    code, _, err = fedsweep("run", "quickstart", "--results", "s3://nowhere/folder")
    assert code == 2
    assert err.startswith("fedsweep: the results at s3://nowhere/folder cannot be written: ")
    assert not s3.exists("nowhere")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "nonsense://x/y",
            f"nonsense://x/y is not a URL that fedsweep opens; the schemes are {', '.join(urls.OPENED)}.",
        ),
        ("s3://", "s3:// names no folder."),
    ],
)
def test_bad_urls(fedsweep, url, message):
    code, _, err = fedsweep("status", url)
    assert (code, err) == (2, f"fedsweep: {message}\n")


def test_a_package_that_is_not_installed_is_named():
    """Without the extra, s3fs cannot be imported."""
    program = "import sys; sys.modules['s3fs'] = None; sys.argv[1:] = ['status', 's3://b/f']; "
    program += "from orchestrator.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == ("fedsweep: s3://b/f needs a package that is not installed: pip install 'fedsweep[s3]'.\n")


def test_a_lock_that_is_being_written_is_read_again(tmp_path, monkeypatch):
    """A file may be empty or incomplete for a moment while it is written: the lock is held all the same."""
    with results_location(f"file://{tmp_path}/results").open_for_writing() as location:
        cat_file = location._files.cat_file
        answers = iter([b" ", b'{"holder": "pro'])
        monkeypatch.setattr(type(location._files), "cat_file", lambda self, path: next(answers, None) or cat_file(path))
        assert location.lock_holder() == location.lock.name


def test_a_text_at_a_url_has_a_limited_size(monkeypatch):
    files = fsspec.filesystem("memory")
    files.pipe_file("/long/best.yaml", b"x" * 11)
    monkeypatch.setattr(urls, "LONGEST_TEXT", 11)
    assert locations.read_text("memory://long/best.yaml") == "x" * 11
    monkeypatch.setattr(urls, "LONGEST_TEXT", 10)
    with pytest.raises(UserError, match=r"memory://long/best\.yaml is larger than 10 bytes"):
        locations.read_text("memory://long/best.yaml")
