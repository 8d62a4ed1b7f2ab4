"""Attacks with a prepared results folder: links to other files, a ledger whose values become paths, and files that
other users can read."""

import os
import shutil
import sqlite3
import stat
import sys
import tempfile
from pathlib import Path

import private_study
import pytest
import reported
from ownership import give_away

from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import results_location
from trainables import files
from trainables.errors import UserError
from trainables.federation.checkpoints import ENDING, PackStorage

STUDY = """\
name: tiny
data: [{source: "synthetic-frozen:60,20,4,2"}]
partitions: [iid]
clients: 2
methods: [{dp-fedgd: {coarse: {learning_rate: [1]}, fine: {learning_rate: [1]}}}]
epsilons: [8]
defaults: paper
rounds: {coarse: 2, fine: 2, confirm: 2}
evaluate_every: 2
seeds: {search: 1, contest: [], confirm: [1]}
resources: {gpus_per_host: 0}
"""
VICTIM = "ssh-ed25519 AAAA victim\n"


@pytest.fixture
def victim(tmp_path):
    """A file outside the results folder, and a check that nothing outside has changed."""
    home = tmp_path / "home"
    home.mkdir()
    file = home / "authorized_keys"
    file.write_text(VICTIM)
    yield file
    assert file.read_text() == VICTIM
    assert sorted(path.name for path in home.iterdir()) == ["authorized_keys"]


# ---- links

REPLACED = ("study.yaml", "best.yaml", "report.html", "remote.lock", "tables/README.md", "tables/accuracy.csv",
            "timing/seconds-per-round.md", "figures/score-by-round.png", "export/trials.parquet",
            "export/.trials.parquet.part", "export/README.md", "export/csv/trials.csv",
            "export/optuna/optuna.db", "export/optuna/optuna.db-journal", "export/optuna/optuna.db-wal")  # fmt: skip
IN_PLACE = ("ledger.sqlite", "ledger.lock", "fedsweep.log", "cancel.requested", "cancel.now", "ledger.sqlite-wal",
            "ledger.sqlite-shm", "ledger.sqlite-journal")  # fmt: skip
COMMANDS = {
    "status": (),
    "tables": ("tables", "timing"),
    "best": (),
    "figures": ("figures",),
    "report": (),
    "check --repair": (),
    "account": (),
    "export": ("export",),
    "export --to csv": ("export/csv",),
    "export --to optuna": ("export/optuna",),
    "export --to tensorboard": ("export/tensorboard",),
    "resume --backend local": ("tables", ".packs"),
}
"""With the folders that a command writes to."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A finished results folder, copied by every test."""
    from orchestrator.execution import study_run
    from orchestrator.execution.progress import LineView
    from orchestrator.study.reading import parse

    folder = tmp_path_factory.mktemp("prepared") / "results"
    study_run.run(parse(STUDY, "study.yaml", None), STUDY, folder, LineView(), backend="local")
    return folder


@pytest.fixture
def results(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "results")


def plant(results, name, target):
    place = results / name
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.symlink_to(target)


@pytest.mark.parametrize("ending", ["", "-journal", "-wal"])
def test_an_export_keeps_a_database_of_the_user(ending, results, tmp_path, fedsweep):
    own = tmp_path / "mine" / f"optuna.db{ending}"
    own.parent.mkdir()
    own.write_bytes(b"SQLite format 3\0" + bytes(200))
    code, _, err = fedsweep("export", results, "--to", "optuna", "--out", own.parent)
    assert code == 2, err
    assert "is not an earlier export of fedsweep; choose another folder with --out" in err
    assert own.read_bytes() == b"SQLite format 3\0" + bytes(200)
    own.unlink()
    for _ in range(2):
        assert fedsweep("export", results, "--to", "optuna", "--out", own.parent)[0] == 0
    assert os.listdir(own.parent) == ["optuna.db"]


@pytest.mark.parametrize("command", COMMANDS)
def test_files_that_are_replaced_are_not_written_through_links(command, results, victim, fedsweep):
    word, *options = command.split()
    for target in (victim, victim.with_name("new")):
        for name in REPLACED:
            plant(results, name, target)
        code, _, err = fedsweep(word, results, *options)
        assert code == 0, err
        assert os.listdir(victim.parent) == [victim.name]


@pytest.mark.parametrize("name", IN_PLACE)
def test_files_that_are_written_in_place_are_no_links(name, results, victim, fedsweep):
    for target in (victim, victim.with_name("new")):
        plant(results, name, target)
        for command in ("status", "tables", "resume --backend local", "cancel"):
            word, *options = command.split()
            code, _, err = fedsweep(word, results, *options)
            assert "Traceback" not in err
            assert os.listdir(victim.parent) == [victim.name]
        assert (results / name).is_symlink()
        assert code == 2, "cancel: nothing runs, or the link is refused"


def test_a_request_to_stop_follows_no_link(results, victim):
    plant(results, "cancel.requested", victim.with_name("new"))
    with pytest.raises(UserError, match=r"cancel\.requested is a symbolic link"):
        results_location(results).request_stop()


@pytest.mark.parametrize(("command", "name"), [(word, name) for word, names in COMMANDS.items() for name in names])
def test_folders_that_are_links_are_refused(command, name, results, victim, fedsweep):
    word, *options = command.split()
    if name == ".packs":  # only written while trials run
        changed(results, ("DELETE FROM trials", ()))
    plant(results, name, victim.parent)
    code, _, err = fedsweep(word, results, *options)
    assert code == 2
    assert f"{results / name} is a symbolic link, and nothing is written through one" in err


def test_hard_links_are_not_written(tmp_path, victim):
    for name in ("ledger.lock", "fedsweep.log"):
        folder = tmp_path / name
        folder.mkdir()
        os.link(victim, folder / name)
        with pytest.raises(UserError, match="has several names"):
            files.open_in_place(folder / name, os.O_RDWR)
        (folder / name).unlink()


def test_the_results_folder_itself_may_be_a_link(tmp_path, results, fedsweep):
    """The user has chosen it, for example to keep results on another disk."""
    (tmp_path / "link").symlink_to(results)
    for command in ("tables", "export --to csv", "resume --backend local"):
        word, *options = command.split()
        code, _, err = fedsweep(word, tmp_path / "link", *options)
        assert code == 0, err


def test_a_pipe_in_place_of_a_lock_does_not_block(results, fedsweep):
    (results / "ledger.lock").unlink()
    os.mkfifo(results / "ledger.lock")
    code, out, _ = fedsweep("status", results)
    assert code == 0
    assert "finished" in out
    code, _, err = fedsweep("resume", results, "--backend", "local")
    assert code == 2
    assert "ledger.lock is not a plain file" in err


def test_checkpoints_do_not_follow_links(tmp_path, victim):
    storage = PackStorage(str(tmp_path / ".packs"))
    (tmp_path / ".packs").symlink_to(victim.parent)
    with pytest.raises(UserError, match=r"\.packs is a symbolic link"):
        storage.create()
    (tmp_path / ".packs").unlink()
    storage.create()
    storage.save(["a"], 1, b"x")
    (name,) = storage._names(ENDING)
    for planted in (f"{name}.checkpoint", f"{name}.checkpoint.part"):
        (tmp_path / ".packs" / planted).unlink(missing_ok=True)
        (tmp_path / ".packs" / planted).symlink_to(victim)
        storage.save(["a"], 2, b"y")
    assert storage.load(name) == (2, b"y")


def test_models_and_predictions_do_not_follow_links(tmp_path, victim, monkeypatch, fedsweep, no_ray):
    """`exists` is False for a link to a file that does not exist yet."""
    monkeypatch.chdir(tmp_path)
    new = victim.with_name("new")
    (tmp_path / "model.npz.part").symlink_to(victim)
    (tmp_path / "model.npz").symlink_to(new)
    train = ("train", "--data", "synthetic-frozen:60,20,4,2", "--clients", 2, "--rounds", 1, "--evaluate-every", 1,
             "--epsilon", 8)  # fmt: skip
    code, _, err = fedsweep(*train, "--save", "model.npz")
    assert not new.exists()
    (tmp_path / "model.npz").unlink()
    code, _, err = fedsweep(*train, "--save", "model.npz")
    assert code == 0, err
    (tmp_path / "out.csv").symlink_to(new)
    fedsweep("predict", "model.npz", "synthetic-frozen:60,20,4,2", "--output", "out.csv")
    assert not new.exists()


# ---- values of a hostile ledger

HOSTILE_KEYS = ("/../../../home/x", "../../../../home", "/etc/passwd", "a" * 23, "A" * 24, "0" * 23 + "/", "",
                "0" * 24 + "\n", 5, b"0" * 24)  # fmt: skip


def changed(folder, *statements):
    connection = sqlite3.connect(folder / "ledger.sqlite")
    for statement, values in statements:
        connection.execute(statement, values)
    connection.commit()
    connection.close()


@pytest.mark.parametrize("key", HOSTILE_KEYS)
def test_a_key_that_is_no_key_is_refused(key, results, victim, fedsweep):
    old = sqlite3.connect(results / "ledger.sqlite").execute("SELECT key FROM trial_keys").fetchone()[0]
    changed(results, ("DELETE FROM winners", ()), ("UPDATE trial_keys SET key = ? WHERE key = ?", (key, old)))
    code, _, err = fedsweep("export", "--to", "tensorboard", results)
    assert code == 2
    assert "is damaged" in err
    assert "is not a trial's key" in err


def test_a_winner_without_a_row_is_refused(results, fedsweep):
    changed(results, ("DELETE FROM trials", ()))
    code, _, err = fedsweep("status", results)
    assert code == 2
    assert "wins a search but has no row" in err


@pytest.mark.parametrize("read", [Ledger.stages, Ledger.outcomes, Ledger.origins])
@pytest.mark.parametrize("change", ["UPDATE OR REPLACE trial_keys SET key = '/../../..'", "DELETE FROM trial_keys"])
def test_every_key_that_is_read_is_checked(read, change, results):
    changed(results, (change, ()))
    with pytest.raises(UserError, match="is not a trial's key"), Ledger.read(results) as ledger:
        read(ledger)


@pytest.mark.parametrize("name", ["../../..", "/tmp", "a/b", "..", "a\x00b", "x" * 200])
@pytest.mark.parametrize("column", ["stage", "strategy"])
def test_stages_and_strategies_name_no_path(name, column, results, fedsweep):
    """A search with a strategy that the study does not have is not read."""
    changed(results, (f"UPDATE OR REPLACE stages SET {column} = ?", (name,)))
    before = set(results.parent.rglob("*"))
    code, _, err = fedsweep("export", results, "--to", "tensorboard")
    assert code == (2 if column == "stage" else 0)
    assert ("is damaged" in err) == (column == "stage")
    assert all(path.is_relative_to(results) for path in set(results.parent.rglob("*")) - before)


VALUES = {
    "spec": (b"{}", None),
    "reason": (b"x",),
    "rounds": (-1, 1e300, "many", 2**62),
    "accuracy": ("much", b"\x00"),
    "metrics": (5, "[]", '{"accuracy": 5}', '{"accuracy": {"x": 1}}', '{"accuracy": {"1": "x"}}',
                '{"accuracy": {"' + "9" * 5000 + '": 1}}', '{"accuracy": {"1": ' + "9" * 5000 + "}}", "[" * 100_000),
    "epsilon_claimed": ("x", b""),
    "seconds": ("x",),
    "correct": ("x", 5),
}  # fmt: skip


@pytest.mark.parametrize(("column", "value"), [(name, value) for name, values in VALUES.items() for value in values])
def test_values_of_other_types_are_refused(column, value, results, fedsweep):
    """SQLite stores any type in any column."""
    try:
        changed(results, ("PRAGMA ignore_check_constraints = 1", ()), (f"UPDATE trials SET {column} = ?", (value,)))
    except sqlite3.IntegrityError:
        return  # SQLite itself refuses it
    with pytest.raises(UserError, match="is damaged"), Ledger.read(results) as ledger:
        ledger.rows(ledger.outcomes())


def test_an_export_removes_only_its_own_files(results, fedsweep):
    code, _, err = fedsweep("export", results, "--to", "tensorboard")
    assert code == 0, err
    runs = list((results / "export" / "tensorboard").glob("*/*"))
    (runs[0] / "mine.txt").write_text("kept")
    code, *_ = fedsweep("export", results, "--to", "tensorboard")
    assert code == 0
    assert (runs[0] / "mine.txt").read_text() == "kept"
    assert all(len(list(run.glob("events.out.tfevents.*"))) == 1 for run in runs)


# ---- secrets


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir()) if not path.is_dir()
            or path == folder}  # fmt: skip


def test_a_private_search_is_readable_by_its_user_only(tmp_path, open_umask, fedsweep):
    folder = tmp_path / "results"
    (tmp_path / "tiny.yaml").write_text(private_study.TEXT)
    code, _, err = fedsweep("run", tmp_path / "tiny.yaml", "--results", folder, "--backend", "local")
    assert code == 0, err
    found = modes(folder)
    assert found.pop("results") == 0o700
    assert {found[name] for name in ("ledger.sqlite", "ledger.lock", "fedsweep.log")} == {0o600}


def test_a_private_search_at_a_url_of_this_machine_is_readable_by_its_user_only(tmp_path, open_umask, fedsweep):
    run, merged = tmp_path / "run", tmp_path / "merged"
    (tmp_path / "tiny.yaml").write_text(private_study.TEXT)
    code, _, err = fedsweep("run", tmp_path / "tiny.yaml", "--results", f"file://{run}", "--backend", "local")
    assert code == 0, err
    code, _, err = fedsweep("merge", f"file://{run}", "--results", f"file://{merged}")
    assert code == 0, err
    for folder in (run, merged):
        found = modes(folder)
        assert found.pop(folder.name) == 0o700
        assert found["ledger.sqlite"] == 0o600
    assert modes(run)["fedsweep.log"] == 0o600


def test_a_folder_that_was_open_is_closed(tmp_path, open_umask, fedsweep):
    """Also the merged folder, which receives the secrets of its parts."""
    part, merged = tmp_path / "part", tmp_path / "merged"
    part.mkdir()
    (tmp_path / "tiny.yaml").write_text(private_study.TEXT)
    assert fedsweep("run", tmp_path / "tiny.yaml", "--results", part, "--backend", "local")[0] == 0
    assert fedsweep("merge", part, "--results", merged)[0] == 0
    for folder in (part, merged):
        found = modes(folder)
        assert found.pop(folder.name) == 0o700
        assert {found[name] for name in ("ledger.sqlite", "ledger.lock")} == {0o600}


def test_secrets_make_a_ledger_private(tmp_path, open_umask):
    from handmade_ledgers import cell_id, study

    with Ledger.write(tmp_path / "r") as ledger:
        assert modes(tmp_path / "r")["ledger.sqlite"] == 0o644
        ledger.secret(cell_id(study(), "DP-FedGD", 1), "")
        found = modes(tmp_path / "r")
    assert found.pop("r") == 0o700
    assert set(found.values()) == {0o600}, "the write-ahead log too"


def test_a_private_search_needs_a_folder_of_its_own(tmp_path, monkeypatch):
    """Another user's folder cannot be closed: that user could open it again."""
    (tmp_path / "r").mkdir(mode=0o755)
    give_away(tmp_path / "r", monkeypatch)
    with pytest.raises(UserError, match="belongs to another user"), Ledger.write(tmp_path / "r", private=True):
        pass


def test_working_copies_of_a_url_are_private(tmp_path, open_umask):
    reported.write(tmp_path / "r")
    with results_location(f"file://{tmp_path}/r").open_for_reading() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="becoming another user needs root")
def test_another_user_reads_no_secret(open_umask):
    """By trying it, in a folder that everyone can enter."""
    tmp_path = Path(tempfile.mkdtemp())
    tmp_path.chmod(0o755)
    from handmade_ledgers import cell_id, study

    with Ledger.write(tmp_path / "r", private=True) as ledger:
        ledger.secret(cell_id(study(), "DP-FedGD", 1), "")
    (tmp_path / "public").write_text("x")
    assert as_nobody(tmp_path / "public") == 0, "the test itself works"
    assert as_nobody(tmp_path / "r" / "ledger.sqlite") == 1
    shutil.rmtree(tmp_path)


def as_nobody(file):
    """Whether another user can read a file: 0 if so."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            open(file, "rb").close()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---- files that SQLite opens


def test_a_journal_that_names_another_file_is_refused(results, victim, fedsweep):
    """SQLite deletes the file that it names after the rollback."""
    name = str(victim).encode()
    content = b"\0" * 512 + name + len(name).to_bytes(4, "big") + bytes(4) + bytes.fromhex("d9d505f920a163d7")
    (results / "ledger.sqlite-journal").write_bytes(content)
    for command in ("status", "forget --node x", "resume --backend local", "tables"):
        word, *options = command.split()
        code, _, err = fedsweep(word, results, *options)
        assert code == 2
        assert "ledger.sqlite-journal names another file" in err
    assert victim.exists()


@pytest.mark.parametrize("ending", ["", "-wal", "-shm", "-journal"])
def test_hard_links_of_the_ledger_are_refused(ending, results, victim, fedsweep):
    file = results / f"ledger.sqlite{ending}"
    if ending:
        file.unlink(missing_ok=True)
        file.hardlink_to(victim)
    else:
        (victim.parent.parent / "other").hardlink_to(file)
    before = victim.read_bytes()
    code, _, err = fedsweep("status", results)
    assert code == 2
    assert f"{file} has several names (hard links), and nothing is written to it" in err
    assert victim.read_bytes() == before


def test_a_trigger_in_capitals_is_refused(results, fedsweep):
    changed(
        results,
        ("CREATE TRIGGER t AFTER INSERT ON studies BEGIN DELETE FROM trials; END", ()),
        ("PRAGMA writable_schema = ON", ()),
        ("UPDATE sqlite_master SET type = 'TRIGGER' WHERE name = 't'", ()),
    )
    code, _, err = fedsweep("status", results)
    assert code == 2
    assert "it has views, triggers or virtual tables" in err


def test_permissions_do_not_change_through_a_link(tmp_path):
    victim = tmp_path / "home"
    victim.mkdir(mode=0o755)
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "ledger.lock").symlink_to(victim)
    with pytest.raises(UserError, match="is a symbolic link"), Ledger.write(folder, private=True):
        pass
    assert stat.S_IMODE(victim.stat().st_mode) == 0o755


def test_a_winner_that_is_none_is_computed_again(results, fedsweep):
    before = fedsweep("best", results)
    changed(results, ("UPDATE winners SET winner = ?", ('{"a": [1, null]}',)))
    assert fedsweep("best", results) == before


# ---- files that exist under another name as well


def test_a_stop_request_does_not_empty_a_file_under_another_name(results, victim):
    os.link(victim, results / "cancel.requested")
    with pytest.raises(UserError, match="has several names"):
        results_location(str(results)).request_stop()


def test_a_private_folder_does_not_change_who_may_read_a_file_under_another_name(results, victim):
    victim.chmod(0o644)
    os.link(victim, results / "other.log")
    with pytest.raises(UserError, match="has several names"):
        files.make_private(results, "other.log")
    assert stat.S_IMODE(victim.stat().st_mode) == 0o644


def test_a_comparison_is_not_written_through_a_link(results, victim, fedsweep):
    plant(results, "compare", victim.parent)
    code, _, err = fedsweep("compare", results)
    assert code == 2
    assert "is a symbolic link" in err


@pytest.mark.parametrize("name", ["results", "results/tiny"])
def test_the_default_results_folder_is_no_link(name, tmp_path, fedsweep, monkeypatch):
    """The current folder may come from anyone, and so may the name of the study."""
    victim, place = tmp_path / "victim", tmp_path / "downloaded" / name
    (victim / "tiny").mkdir(parents=True)
    place.parent.mkdir(parents=True)
    place.symlink_to(victim)
    monkeypatch.chdir(tmp_path / "downloaded")
    Path("study.yaml").write_text(
        "name: tiny\ndata: ['synthetic-frozen:60,20,4,2']\nmethods: [dp-fedgd]\nepsilons: [1]\n"
    )
    code, _, err = fedsweep("run", "study.yaml", "--backend", "local")
    assert code == 2
    assert f"{name} is a symbolic link" in err
    assert [path for path in victim.rglob("*") if path.is_file()] == []
