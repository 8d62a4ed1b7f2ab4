"""Fixtures. `shared_data` skips tests whose feature files are missing; the others need only the package."""

import os
import shutil
import sys
from pathlib import Path

import hypothesis
import pytest
from plugin_registry import temporary_plugins
from repository_files import REPOSITORY

from trainables import plugins

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's workers would wait for all other tests
pytest.register_assert_rewrite("chaos", "command_line", "observed", "small", "twin_agreement")
hypothesis.settings.register_profile("fedsweep", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("fedsweep")


def pytest_addoption(parser):
    parser.addoption("--counts-into", type=Path, help="the page whose table of faults is rewritten")


SLOWEST = tuple(
    f"test_{name}.py"
    for name in (
        *("faults", "methods", "audit", "observed_releases", "mlp", "sweep", "federation", "slots", "plugins"),
        *("fednew", "documented", "one_run_audit"),
    )
)


LONG = frozenset(Path(__file__).with_name("long_tests.txt").read_text().splitlines())
"""Tests of more than about 8 seconds on two cores. `make long` runs them, and `.ci/run` does after the others."""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    """The slowest files first, so that no worker runs a long file alone at the end."""
    for item in items:
        if f"{item.path.name}::{item.name}" in LONG:
            item.add_marker("long")
    items.sort(key=lambda item: SLOWEST.index(item.path.name) if item.path.name in SLOWEST else len(SLOWEST))


@pytest.fixture(scope="session")
def repository():
    return REPOSITORY


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """The results of a small study, not to be changed."""
    import reported

    folder = tmp_path_factory.mktemp("written") / "results"
    reported.write(folder)
    return folder


@pytest.fixture
def results(written, tmp_path):
    return shutil.copytree(written, tmp_path / "results")


@pytest.fixture(scope="session")
def small_problem():
    """600 rows of 12 features in 4 classes, partitioned unevenly over 5 clients."""
    import small

    return small.problem()


@pytest.fixture(params=["compiled cpu", "torch cpu", "interpreted cpu", "triton cuda", "torch cuda"])
def device(request):
    """Runs a test with every kernel of a linear head; the value is the kernel's device."""
    from every_kernel import computing_with

    kernel, name = request.param.split()
    with computing_with(kernel, name):
        yield name


@pytest.fixture(scope="module", params=["compiled", "torch"])
def both_kernels(request):
    """Runs the tests of a file with the compiled kernel and with torch's, on one thread, as client hosts do."""
    import torch

    from trainables.models import kernels

    if request.param == "compiled" and kernels.library() is None:
        pytest.skip("there is no compiler here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernels._chosen, "cpu", request.param)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield request.param
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared_data():
    """The path of a real feature file; skips the test if it is missing."""
    folder = Path(os.environ.get("FEDSWEEP_DATA") or REPOSITORY.parent / "shared" / "data")

    def find(name: str) -> Path:
        path = folder / name
        if not path.is_file():
            pytest.skip(f"{path} does not exist; set FEDSWEEP_DATA to the folder that holds {name}")
        return path

    return find


@pytest.fixture
def fedsweep(monkeypatch, capfd):
    """Runs the command in this process; returns exit code, standard output and standard error."""

    from orchestrator.cli import main

    def call(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedsweep", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capfd.readouterr()
        return caught.value.code or 0, out, err

    return call


@pytest.fixture(autouse=True)
def isolated_plugins(monkeypatch):
    """No test sees plug-ins that an earlier test loaded."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.setenv(plugins.FOLDERS, "")
    with temporary_plugins():
        yield


@pytest.fixture(scope="module")
def local_ray():
    """A local Ray with two CPUs, shut down after each test file."""
    from orchestrator.execution.cluster.connect import connected

    with connected(cpus=2):
        yield


@pytest.fixture
def no_ray(monkeypatch):
    """Commands run as documented, but in this process: on the local backend, and training on a server here."""
    from orchestrator.execution import study_run, training_federation
    from orchestrator.execution.backends.local import LocalBackend

    monkeypatch.setattr(study_run.backends, "get", lambda *_: LocalBackend())
    monkeypatch.setattr(
        training_federation, "_on_ray", lambda trial, problem, *_: training_federation._in_process(trial, problem)
    )


PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture
def tally(request, pytestconfig):
    """Counts the faults that a test injects. With `--counts-into`, pytest's cache keeps the counts of every test that
    passed, so that the table can be computed in several runs; `--cache-clear` starts again."""
    import chaos

    faults = chaos.Tally()
    yield faults
    page = pytestconfig.getoption("--counts-into")
    if page is not None and request.node.stash.get(PASSED, False):
        tests = {**pytestconfig.cache.get("faults/tests", {}), request.node.name: faults.record()}
        pytestconfig.cache.set("faults/tests", tests)
        chaos.write_counts(tests, page)
