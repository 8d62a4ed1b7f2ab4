"""Fixtures. Everything here needs only the package, except `shared_data`, which skips where the files are not."""

import os
import sys
from pathlib import Path

import hypothesis
import pytest
from plugin_registry import added_for_now
from repository_files import REPOSITORY

from trainables import plugins

pytest.register_assert_rewrite("chaos", "command_line", "observed", "small", "twin_agreement")
hypothesis.settings.register_profile("fedsweep", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("fedsweep")


def pytest_addoption(parser):
    parser.addoption("--counts-into", type=Path, help="a page whose table of faults is to be written anew")


SLOW = ("test_faults.py", "test_methods.py", "test_audit.py", "test_sweep.py", "test_plugins.py", "test_slots.py")


def pytest_collection_modifyitems(items):
    """The slowest files first: where two run at a time, neither is left alone with one at the end."""
    items.sort(key=lambda item: SLOW.index(item.path.name) if item.path.name in SLOW else len(SLOW))


@pytest.fixture(scope="session")
def repository():
    return REPOSITORY


@pytest.fixture(scope="session")
def small_problem():
    """600 rows of 12 features in 4 classes, partitioned unevenly over 5 clients."""
    import small

    return small.problem()


@pytest.fixture(scope="module", params=["compiled", "torch"])
def both_kernels(request):
    """Everything holds for our own kernels and for torch's; with one thread, as on every client host."""
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
    """The path of a real feature file, or a skip that says it was not there."""
    folder = Path(os.environ.get("FEDSWEEP_DATA") or REPOSITORY.parent / "shared" / "data")

    def find(name: str) -> Path:
        path = folder / name
        if not path.is_file():
            pytest.skip(f"{path} is not there; set FEDSWEEP_DATA to the folder that holds {name}")
        return path

    return find


@pytest.fixture
def fedsweep(monkeypatch, capfd):
    """The command, in this process: exit code, standard output, standard error."""

    from orchestrator.cli import main

    def call(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedsweep", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capfd.readouterr()
        return caught.value.code or 0, out, err

    return call


@pytest.fixture(autouse=True)
def nothing_stays_added(monkeypatch):
    """No test depends on those before it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    with added_for_now():
        yield


@pytest.fixture(scope="module")
def local_ray():
    """A local Ray with two processors, for the tests of one file: none is left to the next."""
    from orchestrator.execution.cluster.connect import connected

    with connected(cpus=2):
        yield


@pytest.fixture
def no_ray():
    """Sweeps and trainings run in this process."""
    from without_ray import without_ray

    with without_ray():
        yield


@pytest.fixture(scope="session")
def all_faults():
    import chaos

    return chaos.Tally()


@pytest.fixture
def tally(all_faults, request, pytestconfig):
    """How often each fault struck so far; after each test it goes into the page that was asked for."""
    yield all_faults
    page = pytestconfig.getoption("--counts-into")
    if page is not None:
        here = request.session.items.index(request.node) + 1
        all_faults.write_into(page, f"{here} of {len(request.session.items)} tests")
