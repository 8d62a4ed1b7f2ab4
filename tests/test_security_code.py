"""Attacks that try to execute code: modules planted in the current folder or next to a plug-in, on the driver and on
Ray workers, and files that libraries read from the current folder."""

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import reported

from trainables.errors import UserError

INSTALLED = ("torch", "scipy", "pandas", "numpy", "trainables", "csv")
OPTIONAL = ("wandb", "triton")
"""Imported if they are installed; where they are not, Python looks through the whole search path."""
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
resources: {hosts: 1, gpus_per_host: 0, federations: 1}
"""
PROBE = """\
import json, os, sys
from importlib import metadata
with open(os.environ["PROBE"], "a") as out:
    packages = [found.name for found in metadata.distributions()]
    print(json.dumps({"pid": os.getpid(), "path": sys.path, "packages": packages}), file=out)

from fedsweep.plugins import Method, learning_rate

class Probe(Method):
    name, title, paper, hyperparameters = "dp-probe", "Probe", "none", (learning_rate(1),)

    def step(self, t, theta, G, state, hypers):
        return theta - hypers["learning_rate"] * G
"""


def plant(folder, names=(*INSTALLED, *OPTIONAL)):
    """Modules that record that they were executed, then fail."""
    for name in names:
        record = f"open({str(folder / f'executed-{name}')!r}, 'w').close()\n"
        (folder / f"{name}.py").write_text(f"{record}raise SystemExit('planted {name} was executed')\n")


PLACEHOLDER = "__editable__.other.finder.__path_hook__"
"""As setuptools adds to the search path for a package that is installed in place."""


def plant_package(folder):
    """A package in place of a relative path. Libraries call the functions that its entry points name, torch for one:
    a function of setuptools executes the setup.py of the current folder."""
    about = folder / PLACEHOLDER / "planted-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")


def with_relative_path(folder):
    """The PYTHONPATH of Python processes whose search path has a relative path."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.path.append({PLACEHOLDER!r})\n")
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def executed(*folders):
    return [file.name for folder in folders for file in folder.glob("executed-*")]


def call(folder, *arguments, **environment):
    command = [sys.executable, "-m", "orchestrator.cli", *map(str, arguments)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.ray
def test_modules_in_the_current_folder_and_next_to_a_plug_in_are_not_executed(tmp_path):
    """The plug-in is loaded by the driver and by Ray workers, where it records the search path."""
    downloaded, extra, probe = tmp_path / "downloaded", tmp_path / "extra", tmp_path / "probe"
    for folder in (downloaded, extra):
        folder.mkdir()
    plant(downloaded)
    plant(extra, INSTALLED)
    plant_package(downloaded)
    (extra / "probe_plugin.py").write_text(PROBE)
    (downloaded / "study.yaml").write_text(STUDY.replace("dp-fedgd", "dp-probe"))
    found = call(downloaded, "--import", extra / "probe_plugin.py", "run", "study.yaml", "--results", "r",
                 PROBE=str(probe), PYTHONPATH=with_relative_path(tmp_path / "site"))  # fmt: skip
    assert executed(downloaded, extra) == []
    assert found.returncode == 0, found.stderr
    seen = [json.loads(line) for line in probe.read_text().splitlines()]
    assert len({each["pid"] for each in seen}) > 1, "no worker has loaded the plug-in"
    for each in seen:
        installed = max(n for n, place in enumerate(each["path"]) if place.endswith("site-packages"))
        assert str(downloaded) not in each["path"]
        assert "" not in each["path"]
        assert "planted" not in each["packages"]
        assert each["path"].index(str(extra)) > installed


READING = ("status .", "tables .", "best .", "report .", "figures .", "plan study.yaml", "methods", "export . --to csv")
PROGRAM = """\
import sys
from orchestrator import cli
for command in sys.argv[1:]:
    sys.argv = ["fedsweep", *command.split()]
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            print(command, end, file=sys.stderr)
"""


def test_no_command_that_reads_a_folder_executes_what_lies_in_it(tmp_path):
    reported.write(tmp_path)
    (tmp_path / "study.yaml").write_text(STUDY)
    plant(tmp_path)
    command = [sys.executable, "-c", PROGRAM, *READING]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert executed(tmp_path) == [], found.stderr
    assert found.stderr == ""


def test_python_m_does_not_search_the_current_folder(tmp_path):
    plant(tmp_path)
    found = call(tmp_path, "methods")
    assert executed(tmp_path) == []
    assert found.returncode == 0, found.stderr


def test_a_relative_path_names_nothing_in_the_current_folder(tmp_path):
    """A package that is installed in place adds one, and `importlib.metadata` looks there for entry points."""
    path = with_relative_path(tmp_path / "site")
    program = "import orchestrator.cli, sys; from importlib import metadata as m; print(sys.path); m.version('planted')"
    for planted in (False, True):
        if planted:
            plant_package(tmp_path)
        found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
                               capture_output=True, text=True)  # fmt: skip
        assert "PackageNotFoundError" in found.stderr
        assert (PLACEHOLDER in found.stdout) == (not planted), "namespace packages need it"


def test_processes_of_check_method_do_not_search_the_current_folder(tmp_path):
    plant(tmp_path, ("multiprocessing",))
    program = """import orchestrator.cli, operator
from trainables import methods
from trainables.audit import contract
with contract._runner(methods.get("dp-fedgd"), {"name": [operator.attrgetter("name")]}, 2) as failures:
    print(*failures("name"))
"""
    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert executed(tmp_path) == [], found.stderr
    assert found.stdout == "dp-fedgd\n", found.stderr


def test_the_current_folder_stays_on_the_path_of_python_programs(tmp_path):
    """A notebook imports its own modules after fedsweep; only the command line leaves the folder out."""
    (tmp_path / "mine.py").write_text("")
    command = [sys.executable, "-c", "import fedsweep, mine"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_relative_paths_keep_their_meaning_in_another_current_folder(tmp_path, monkeypatch):
    """A local Ray is started in a folder of its own."""
    from orchestrator.execution.cluster import connect
    from trainables.data.sources import fetching
    from trainables.files import current_folder

    here, other = tmp_path / "here", tmp_path / "other"
    here.mkdir()
    other.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}modules")
    monkeypatch.setenv("FEDSWEEP_CACHE", "cache")
    with connect._in_folder(other):
        assert os.getcwd() == str(other)
        assert current_folder() == here
        assert fetching.cache_folder() == here / "cache"
        assert os.environ["PYTHONPATH"] == str(here / "modules")
    assert os.getcwd() == str(here)
    assert os.environ["PYTHONPATH"] == f"{os.pathsep}modules"
    assert "FEDSWEEP_FOLDER" not in os.environ


@pytest.mark.ray
def test_other_users_cannot_enter_the_folder_of_a_local_ray(tmp_path, local_ray):
    from orchestrator.execution.cluster.ray_internals import session_folder

    sockets = os.path.join(session_folder(), "sockets")
    assert os.listdir(sockets)
    folder, modes = sockets, []
    while folder != "/":
        status = os.stat(folder)
        modes.append((status.st_uid, stat.S_IMODE(status.st_mode)))
        folder = os.path.dirname(folder)
    assert (os.geteuid(), 0o700) in modes


def test_a_prepared_folder_for_ray_is_not_used(tmp_path, monkeypatch):
    """Another user may have made the folder first: as a link, or writable for everyone."""
    from orchestrator.execution.cluster import private_folder

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(private_folder, "LONGEST_SOCKET", 1000)
    mine = private_folder.private_folder()
    assert mine == private_folder.private_folder(), "it is used again"
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    mine.chmod(0o777)
    assert private_folder.private_folder() != mine
    mine.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    mine.symlink_to(tmp_path / "elsewhere")
    other = private_folder.private_folder()
    assert other != mine
    assert not other.is_symlink()
    assert stat.S_IMODE(other.stat().st_mode) == 0o700


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a process or file of another user")
LISTENER = """import os, socket, sys
if len(sys.argv) > 2:
    os.setuid(int(sys.argv[2]))
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()"""


@contextlib.contextmanager
def listener(place, user):
    """The port at which a process of this user accepts connections."""
    command = [sys.executable, "-I", "-c", LISTENER, place, *([str(user)] if user else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield int(process.stdout.readline())
        process.communicate()


@needs_root
def test_auto_is_no_cluster_of_another_user(tmp_path, monkeypatch):
    """Ray believes a file that every user can write; the cluster that it names would get this user's token."""
    from ray._private import services

    from orchestrator.execution.cluster import connect

    monkeypatch.setattr(services, "find_gcs_addresses", frozenset)  # of Rays that run on this machine now
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    with listener("0.0.0.0", 65534) as port:
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{port}")
        with pytest.raises(UserError, match="neither you nor root has started its head on this machine"):
            connect._join("auto")


@pytest.fixture
def raylet():
    """A program with the name of Ray's, which every user may start."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield shutil.copy("/bin/sh", Path(folder) / "raylet")


@pytest.mark.parametrize("user", [None, pytest.param(65534, marks=needs_root)])
def test_only_a_ray_of_this_user_names_a_cluster(raylet, user):
    """A program that runs as root for any user, such as passwd, has arguments that the user chooses."""
    from orchestrator.execution.cluster.ray_internals import own_clusters

    for program, address in ((raylet, "192.0.2.10:6379"), ("/bin/sh", "192.0.2.11:6379")):
        command = [program, "-c", "read line", f"--gcs-address={address}", "--gcs-address=none"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, user=user) as process:
            assert (address in own_clusters()) == (program == raylet and user is None)
            process.communicate()


@pytest.mark.parametrize("user", [None, pytest.param(65534, marks=needs_root)])
@pytest.mark.parametrize("place", ["127.0.0.1", "0.0.0.0"])
def test_the_head_of_another_user_is_not_joined(place, user):
    from orchestrator.execution.cluster.connect import _is_own

    with listener(place, user) as port:
        assert _is_own(f"127.0.0.1:{port}") == (user is None)
        assert _is_own(f"127.0.0.2:{port}") == (user is None and place == "0.0.0.0")
        assert _is_own(f"[::ffff:127.0.0.1]:{port}") == (user is None)
        for elsewhere in ("203.0.113.5", "0.0.0.0", "[::]", "[::1]", "[fe80::1%lo]", "localhost"):
            assert not _is_own(f"{elsewhere}:{port}"), "not one address of this machine at which someone listens"


@needs_root
def test_a_token_of_another_user_is_refused(tmp_path, monkeypatch):
    """With an inherited HOME: its owner could run code in this Ray."""
    from orchestrator.execution.cluster import connect

    token = tmp_path / "auth_token"
    token.write_text("0" * 64)
    os.chown(token, 65534, 65534)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    for call in (connect._make_token, connect._send_token):
        with pytest.raises(UserError, match=r"another user can replace .*set HOME to a folder of your own"):
            call()


@pytest.mark.parametrize("name", [".ray", ".ray/auth_token"])
def test_a_linked_token_is_refused(name, tmp_path, monkeypatch):
    """A link would let the owner of an inherited HOME choose a file whose content is known, or one to be created."""
    from orchestrator.execution.cluster import connect

    home, target = tmp_path / "home", tmp_path / "target"
    (home / name).parent.mkdir(parents=True)
    (home / name).symlink_to(target)
    monkeypatch.setenv("HOME", str(home))
    for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UserError, match="is behind a symbolic link: set RAY_AUTH_TOKEN_PATH"):
        connect._make_token()
    assert not target.exists()


def test_a_home_folder_that_everyone_can_write_to_is_refused(tmp_path, monkeypatch, fedsweep):
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("HOME", str(tmp_path))
    code, _, err = fedsweep("status", ".")
    assert code == 2
    assert "everyone can write to it" in err


@needs_root
def test_a_home_folder_of_another_user_is_refused(tmp_path, monkeypatch, fedsweep):
    os.chown(tmp_path, 65534, 65534)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fedsweep("status", ".") == (
        2,
        "",
        f"fedsweep: HOME = {str(tmp_path)!r}: another user can replace {tmp_path}; set HOME to a folder of your own.\n",
    )


def test_no_entry_of_the_search_path_is_relative(tmp_path):
    """An editable install of a package with namespace packages adds one, and Python imports sitecustomize from it."""
    command = [sys.executable, "-P", "-c", "import sys; print(*sys.path, sep='\\n')"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert [place for place in shown.splitlines() if not os.path.isabs(place)] == []


@pytest.mark.parametrize("value", ["", "here"])
def test_the_private_folder_is_absolute(value, tmp_path, monkeypatch):
    from orchestrator.execution.cluster import private_folder

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", value)
    folder = private_folder.private_folder()
    assert folder.is_absolute()
    assert value or os.listdir(tmp_path) == []


def test_a_long_temporary_folder_leaves_room_for_socket_names(tmp_path, monkeypatch):
    """Names of sockets have at most 107 bytes."""
    from orchestrator.execution.cluster import private_folder

    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    session = "session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store.1"
    assert len(f"{private_folder.private_folder()}/{session}") <= 107


def test_a_readable_token_becomes_private(tmp_path, monkeypatch, capfd):
    from orchestrator.execution.cluster import connect

    token = tmp_path / "auth_token"
    token.write_text("0" * 64)
    token.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    connect._check_token()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert f"{token} was readable by other users" in capfd.readouterr().err
    connect._check_token()
    assert capfd.readouterr().err == ""


DRAWN = {
    "figures": """import sys
from orchestrator.cli import main
sys.argv[1:] = ["figures", "."]
try:
    main()
except SystemExit:
    pass
""",
    "frontier": """from pathlib import Path
from unittest.mock import MagicMock
from orchestrator.report.frontier import draw
point = MagicMock(epsilon=1, score=1, deviation=0)
draw(Path("."), [MagicMock(setting="s", **{"method.shown": "m"}, curve=lambda *_: [point])])
""",
}


@pytest.mark.parametrize("command", DRAWN)
def test_settings_of_matplotlib_in_the_current_folder_are_not_read(command, tmp_path):
    """They could switch on LaTeX, which reads any file that a label names."""
    reported.write(tmp_path)
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nsavefig.facecolor: red\n")
    program = f"""{DRAWN[command]}
import matplotlib
print(matplotlib.rcParams["savefig.facecolor"])
"""
    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.splitlines()[-1:] == ["auto"], found.stderr
