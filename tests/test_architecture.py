"""Imports go one way: whoever reads a room need know only the rooms before it."""

import ast

import pytest

ROOMS = (
    "trainables",
    "search_spaces",
    "orchestrator.console",
    "orchestrator.study",
    "orchestrator.results",
    "orchestrator.search",
    "orchestrator.report",
    "orchestrator.running",
    "benchmarks",
    "orchestrator.commands",
    "orchestrator.cli",
    "fedsweep",
)


def room(module):
    return next((name for name in ROOMS if module == name or module.startswith(f"{name}.")), None)


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("top", ["orchestrator", "trainables", "search_spaces", "benchmarks", "fedsweep"])
def test_imports_go_one_way(repository, top):
    files = list((repository / top).rglob("*.py"))
    assert files
    for file in files:
        module = ".".join(file.relative_to(repository).with_suffix("").parts).removesuffix(".__init__")
        here = room(module)
        for found in filter(None, map(room, imported(file))):
            assert here is None or ROOMS.index(found) <= ROOMS.index(here), f"{file} reaches up to {found}"


def test_trainables_know_nothing_of_the_driver(repository):
    for file in (repository / "trainables").rglob("*.py"):
        assert not [name for name in imported(file) if name.startswith(("orchestrator", "benchmarks"))], file
