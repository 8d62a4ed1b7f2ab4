"""Fuzzing of everything that reads input: each input is accepted, or refused with one sentence.

`make test` tries a few hundred inputs, `make fuzz` ten thousand of each kind; both include those of `corpus/`. Each may
use one GiB of memory, ten CPU seconds and files of its own folder: the test stops whatever exceeds that.
"""

import contextlib
import io
import json
import os
import resource
import signal
import sqlite3
import sys
import tempfile
import zipfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import small
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.results import locations as results
from orchestrator.results import status
from orchestrator.results.ledger import Ledger, SettingFacts
from orchestrator.study import reading
from orchestrator.study.cell_id import SettingId
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.study import Study
from trainables.data import features
from trainables.errors import UserError
from trainables.federation.checkpoints import (
    DIGEST_SIZE,
    ENDING,
    CorruptCheckpointError,
    PackStorage,
    UnusableCheckpointError,
    checkpoint_name,
)
from trainables.federation.hosts import Hosts
from trainables.federation.problem import ProblemData
from trainables.federation.saved_model import SavedModel
from trainables.federation.server import Server

tried = settings(
    max_examples=int(os.environ.get("FEDSWEEP_FUZZ", "100")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
STUDY = {
    "name": "fuzz",
    "data": [{"source": "synthetic-frozen:60,20,3,2", "label": "toy"}],
    "partitions": ["iid", "dirichlet:0.5"],
    "clients": 4,
    "methods": ["dp-fedgd", {"dp-fedadam": {"fixed": {"tau": 0.01}}}],
    "defaults": "paper",
    "epsilons": [1, "mu=0.5"],
    "privacy": {"clip": 1.0, "delta": 1e-5},
    "rounds": {"coarse": 4, "fine": 4, "confirm": 6},
    "seeds": {"search": 1, "confirm": [42, 7]},
    "search": {"strategies": ["grid"]},
    "evaluate_every": 2,
}
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["../../etc/passwd", "", " ", "nan", "1e400", "-0", "\x00", "s3://", "dp-fedgd", "auto", "mu="])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def places(value, path=()):
    """The paths of all values in a nested structure."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def put(value, path, new):
    """A copy with another value at one path."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


# ---- limits on memory, CPU time and files

MAX_BYTES, MAX_SECONDS = 1 << 30, 10
_written: list[str] | None = None
"""Paths that were opened for writing, created or moved while recording."""


class TooSlowError(BaseException):
    """Derived from BaseException, so that no program catches it."""


def _record_writes(event: str, given: tuple) -> None:
    if _written is None:
        return
    if event == "open":
        path, mode, flags = given
        writes = any(c in (mode or "") for c in "wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and not isinstance(path, int):
            _written.append(os.fsdecode(path))
    elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink"):
        _written.extend(os.fsdecode(path) for path in given[:2] if isinstance(path, str | bytes | os.PathLike))
    elif event == "sqlite3.connect":
        _written.append(unquote(urlsplit(os.fsdecode(given[0])).path))
    elif event in ("socket.connect", "socket.getaddrinfo"):
        raise OSError("there is no network here")


sys.addaudithook(_record_writes)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


@contextlib.contextmanager
def limits(folder: Path):
    """The kernel limits memory and CPU time; an audit hook checks the files that are opened."""
    global _written
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if Path("/proc/self/status").exists():  # Linux only
        resource.setrlimit(resource.RLIMIT_DATA, (_status_bytes("VmData") + MAX_BYTES, before[1]))
    handler = signal.signal(signal.SIGPROF, lambda *_: (_ for _ in ()).throw(TooSlowError))
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    _written = []
    try:
        yield
    finally:
        written, _written = _written, None
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_DATA, before)
    home = folder.resolve()
    outside = [path for path in written if not Path(path).resolve().is_relative_to(home) and path != os.devnull]
    assert not outside, f"written outside {folder}: {outside}"


@pytest.fixture(autouse=True)
def contained(tmp_path, monkeypatch):
    """Temporary files and the working directory are inside the test's folder."""
    (tmp_path / "temporary").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path / "elsewhere")


def sentence_of(folder: Path, work, *given) -> str:
    """The error message; empty if the input is accepted. Errors other than UserError fail the test."""
    message = ""
    try:
        with limits(folder):
            work(*given)
    except UserError as error:
        message = str(error).strip()
        assert message
    return message


def test_the_limits_hold(tmp_path, monkeypatch):
    """Checks the checks: without limits nothing below could fail."""
    with pytest.raises(MemoryError), limits(tmp_path):
        np.ones(2 * MAX_BYTES // 8)
    with pytest.raises(AssertionError, match="written outside"), limits(tmp_path / "elsewhere"):
        (tmp_path / "here").write_text("x")
    with pytest.raises(AssertionError, match="written outside"), limits(tmp_path / "elsewhere"):
        sqlite3.connect(f"file:{tmp_path}/x.sqlite", uri=True).close()
    monkeypatch.setitem(globals(), "MAX_SECONDS", 0.05)
    with pytest.raises(TooSlowError), limits(tmp_path):
        any(iter(lambda: 0, 1))


# ---- study files

CORPUS = Path(__file__).with_name("corpus")


def understood_or_refused(text: str, folder: Path) -> None:
    sentence_of(folder, reading.parse, text, "study.yaml", folder)


@pytest.mark.parametrize("file", sorted((CORPUS / "studies").iterdir()), ids=lambda file: file.stem)
def test_studies_that_are_nasty(tmp_path, file):
    copy = tmp_path / "study.yaml"
    copy.write_bytes(file.read_bytes())
    said = sentence_of(tmp_path, lambda: PreparedStudy.prepare(reading.load(str(copy))[0]))
    assert said, "nothing of that can be run"
    assert len(said) < 1000


@tried
@given(st.lists(st.tuples(st.sampled_from(sorted(places(STUDY), key=repr)), values), min_size=1, max_size=3))
def test_a_study_that_is_wrong_somewhere(tmp_path, changes):
    changed = STUDY
    for path, new in changes:
        if path in set(places(changed)):
            changed = put(changed, path, new)
    understood_or_refused(yaml.safe_dump(changed, allow_unicode=True), tmp_path)


@tried
@given(st.text(alphabet=st.sampled_from("abc:-[]{}&*!|>#'\"\n \t%@,?01.~"), max_size=60) | st.text(max_size=60))
def test_a_study_that_is_any_text(tmp_path, text):
    understood_or_refused(text, tmp_path)
    understood_or_refused(f"{yaml.safe_dump(STUDY)}\n{text}", tmp_path)


def damaged(whole: bytes, cuts: list[tuple[float, bytes]], end: float) -> bytes:
    """Some bytes overwritten, and the end cut off."""
    found = bytearray(whole)
    for where, new in cuts:
        start = int(where * len(found))
        found[start : start + len(new)] = new
    return bytes(found[: int(end * len(found)) + 1])


damage = st.tuples(
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), max_size=4),
    st.sampled_from([1.0, 1.0, 1.0, 0.9, 0.5, 0.1, 0.0]),
)


# ---- feature files


@tried
@given(damage)
def test_a_feature_file_that_is_damaged(tmp_path, how):
    buffer = io.BytesIO()
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((20, 3)).astype(np.float32), np.arange(20) % 2
    np.savez(buffer, x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    file = tmp_path / "damaged.npz"
    file.write_bytes(damaged(buffer.getvalue(), *how))
    said = sentence_of(tmp_path, features.load, str(file))
    assert not said or "damaged.npz" in said


def npy(shape: str, dtype: str = "'<f4'", content: bytes = b"") -> bytes:
    """The header of an array, followed by any bytes."""
    head = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + content


def archive(members: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as out:
        for name, content in members.items():
            out.writestr(name, content)
    return buffer.getvalue()


GOOD = {
    "x_train.npy": npy("(4, 1)", content=bytes(16)),
    "y_train.npy": npy("(4,)", "'<i8'", np.array([0, 1, 0, 1]).tobytes()),
    "x_test.npy": npy("(2, 1)", content=bytes(8)),
    "y_test.npy": npy("(2,)", "'<i8'", np.array([0, 1]).tobytes()),
}
NASTY_ARRAYS = {
    "far more rows than there are": npy("(1000000000000, 1000)"),
    "more rows than a number holds": npy("(9223372036854775807, 9223372036854775807)"),
    "fewer than none": npy("(-1, -1)"),
    "no end of axes": npy("(" + "1, " * 70 + ")"),
    "a shape that is no shape": npy("'x'"),
    "a shape that is a program": npy("__import__('os').system('touch outside')"),
    "objects": npy("(1,)", "'|O'", b"cos\nsystem\n(S'touch outside'\ntR."),
    "fields": npy("(4,)", "[('a', '<f4'), ('b', '|S9')]", bytes(52)),
    "text": npy("(4, 1)", "'<U4'", bytes(64)),
    "not a number": npy("(4, 1)", content=np.full(4, np.nan, np.float32).tobytes()),
    "a header without an end": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
    "another version": b"\x93NUMPY\x09\x09",
    "nothing": b"",
    "less than it says": npy("(4, 1)", content=bytes(8)),
}
NASTY_FILES = {name: archive({**GOOD, "x_train.npy": array}) for name, array in NASTY_ARRAYS.items()} | {
    "labels without end": archive({**GOOD, "y_train.npy": npy("(4,)", "'<i8'", np.array([0, 1, 2, 2**62]).tobytes())}),
    "labels below": archive({**GOOD, "y_train.npy": npy("(4,)", "'<i8'", np.array([0, 1, -1, 1]).tobytes())}),
    "packed a thousandfold": archive(
        {**GOOD, "x_train.npy": npy("(100000000, 1)") + bytes(400_000_000 // 100)}, zipfile.ZIP_DEFLATED
    ),
    "a way out": archive({**GOOD, "../../outside": b"x", "/outside": b"x"}),
    "an empty archive": archive({}),
    "an array, no archive": npy("(4, 1)", content=bytes(16)),
    "a pickle": b"\x80\x04cos\nsystem\n(S'touch outside'\ntR.",
}


@pytest.mark.parametrize("name", NASTY_FILES)
def test_feature_files_that_are_nasty(tmp_path, name):
    file = tmp_path / "nasty.npz"
    file.write_bytes(NASTY_FILES[name])
    said = sentence_of(tmp_path, features.load, str(file))
    assert "nasty" in said or name == "a way out", "members that were not asked for stay where they are"


# ---- models that were saved


@tried
@given(damage, st.dictionaries(st.sampled_from(["model", "features", "classes", "provenance", "format"]), values))
def test_a_model_that_is_damaged(tmp_path, how, about):
    buffer = io.BytesIO()
    right = {"format": 1, "model": "softmax", "features": 3, "classes": 2, "provenance": {}}
    np.savez(buffer, weights=np.zeros(8, np.float32), about=json.dumps({**right, **about}))
    file = tmp_path / "damaged.npz"
    for content in (buffer.getvalue(), damaged(buffer.getvalue(), *how)):
        file.write_bytes(content)
        said = sentence_of(tmp_path, SavedModel.load, file)
        assert not said or "damaged.npz" in said


@pytest.mark.parametrize("name", NASTY_ARRAYS)
def test_models_that_are_nasty(tmp_path, name):
    file = tmp_path / "nasty.npz"
    for about in ("{}", "[]", "1", '{"model": 1}', "[" * 5000, '{"model": "mlp:99999", "features": 1e99}'):
        text = np.array(about)
        said_by = npy("()", f"'{text.dtype.str}'", text.tobytes())
        file.write_bytes(archive({"weights.npy": NASTY_ARRAYS[name], "about.npy": said_by}))
        assert "nasty.npz" in sentence_of(tmp_path, SavedModel.load, file)


# ---- checkpoints


@pytest.fixture(scope="module")
def pack_of_two():
    of = small.problem()
    trials = [small.trial(of, "dp-scaffold", {"local_steps": 2}, seed=seed) for seed in (1, 2)]
    server = Server(Hosts(1))
    server.open(trials, ProblemData.of(of))
    server.advance(4)
    return trials, ProblemData.of(of), server.checkpoint()


@tried
@given(damage, st.booleans())
def test_a_checkpoint_that_is_damaged(tmp_path, pack_of_two, how, with_checksum):
    """A pack whose checkpoint cannot be read starts again; what a checksum would have to be wrong for is an error."""
    trials, _, checkpoint = pack_of_two
    keys = [trial.key for trial in trials]
    storage = PackStorage(str(tmp_path / "packs"))
    storage.create()
    storage.save(keys, 4, checkpoint)
    file = tmp_path / "packs" / (checkpoint_name(keys) + ENDING)
    whole = file.read_bytes()
    found = damaged(whole, *how)
    if with_checksum:
        found = storage._digest(ENDING, found[DIGEST_SIZE:]) + found[DIGEST_SIZE:]
    file.write_bytes(found)
    with limits(tmp_path):
        held = storage.trials_by_checkpoint()
        assert set(held) <= {checkpoint_name(keys)}
        try:
            t, read = storage.load(checkpoint_name(keys))
        except (
            CorruptCheckpointError,
            ValueError,
            LookupError,
            TypeError,
        ):  # whatever it is, the pack starts from round 0
            assert found != whole
            return
    assert with_checksum or (t, read) == (4, checkpoint), "what has another checksum is never believed"


class _Program:
    """What a pickle could execute."""

    def __reduce__(self):
        return os.system, ("touch outside",)


def test_a_checkpoint_holds_no_program(tmp_path, pack_of_two):
    trials, data, checkpoint = pack_of_two
    buffer = io.BytesIO()
    torch.save({**torch.load(io.BytesIO(checkpoint), weights_only=True), "states": _Program()}, buffer)
    with limits(tmp_path), pytest.raises(UnusableCheckpointError, match="UnpicklingError"):
        Server(Hosts(1)).open(trials, data, buffer.getvalue())
    assert not list((tmp_path / "elsewhere").iterdir())


# ---- ledgers


@pytest.fixture(scope="module")
def ledger_bytes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with Ledger.write(folder) as ledger:
        ledger.add_study(Study.model_validate({**STUDY, "methods": ["dp-fedgd"]}).model_dump_json(), "text")
        ledger.add_settings({SettingId("toy", "iid"): SettingFacts(6, 6, 6)})
    with sqlite3.connect(folder / "ledger.sqlite") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return (folder / "ledger.sqlite").read_bytes()


@tried
@given(damage)
def test_a_ledger_that_is_damaged(tmp_path, ledger_bytes, how):
    for file in tmp_path.glob("ledger*"):
        file.unlink()
    (tmp_path / "ledger.sqlite").write_bytes(damaged(ledger_bytes, *how))
    said = sentence_of(tmp_path, status.read, tmp_path)
    assert not said or str(tmp_path) in said


NASTY_LEDGERS = {
    "no table": "DROP TABLE trials",
    "a view that never ends": "DROP TABLE settings; CREATE VIEW settings AS "
    "WITH RECURSIVE n(data) AS (SELECT 1 UNION ALL SELECT data + 1 FROM n) SELECT data, data AS partition, "
    "data AS validation_rows, data AS test_rows, data AS protected FROM n",
    "no study": "DELETE FROM studies",
    "a study that is none": "UPDATE studies SET study = '[]'",
    "a study of nothing": "UPDATE studies SET study = '{}'",
    "bytes for text": "UPDATE studies SET study = x'ff00ff'",
    "another version": "UPDATE meta SET value = '-1'",
    "a word for a version": "UPDATE meta SET value = 'x'",
    "a trial that is none": "INSERT INTO stages VALUES ('x', 'grid', 'coarse', 0, 'k'), (1, 2, 3, 4, x'00')",
    "facts that are none": "UPDATE settings SET test_rows = 'many'",
    "a time that is none": "INSERT INTO sessions VALUES (77, 'yesterday')",
    "a count that is none": "INSERT INTO sessions VALUES (77, 1); INSERT INTO batches VALUES (7, 77, 1, 'many', 2)",
    "surroundings of another kind": "INSERT INTO sessions VALUES (77, 1); "
    "INSERT INTO environments VALUES (77, x'00', 3); INSERT INTO origins VALUES (99, 77, x'00', x'00', 1)",
}


@pytest.mark.parametrize("name", NASTY_LEDGERS)
def test_ledgers_that_are_nasty(tmp_path, ledger_bytes, name):
    file = tmp_path / "ledger.sqlite"
    file.write_bytes(ledger_bytes)
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.executescript(NASTY_LEDGERS[name])
    said = sentence_of(tmp_path, status.read, tmp_path)
    assert not said or str(tmp_path) in said


# ---- URLs

URLS = (CORPUS / "urls.txt").read_text().splitlines()


def looked_at(url: str) -> None:
    with results.results_location(url).open_for_reading() as folder:
        status.read(folder)


@pytest.mark.parametrize("url", URLS)
def test_urls_that_are_nasty(tmp_path, url):
    said = sentence_of(tmp_path, looked_at, url)
    assert said, "there are no results"
    assert len(said.splitlines()) == 1


@tried
@given(
    st.sampled_from(["file", "memory", "zip", "dir", "local", "data", "nonsense", "", "simplecache::file"])
    | st.text(max_size=6),
    st.text(max_size=20) | st.sampled_from(["..", "../..", "/", "//", "%2e%2e/x", "~", "~root/x", "a\nb", "\x00"]),
)
def test_any_url(tmp_path, kind, rest):
    assert sentence_of(tmp_path, looked_at, f"{kind}://{rest}")
