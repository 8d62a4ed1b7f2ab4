"""What others add without a fork: methods, heads, data sources and partitions.

A plug-in is a Python module. It is loaded because an installed package names it as an entry point of the group
`fedsweep.plugins`, or because it was asked for: `fedsweep --import MODULE`, or the variable FEDSWEEP_IMPORT, through
which Ray's workers hear of it too. Loading it adds every method that it defines; heads, data sources and partitions add
themselves with the decorators of `fedsweep.plugins`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import itertools
import os
import shlex
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from trainables.errors import UserError

GROUP = "fedsweep.plugins"
VARIABLE = "FEDSWEEP_IMPORT"
_loaded: dict[str, ModuleType] = {}
_asked_for: dict[str, str] = {}
"""By module: how it was named, a file by its whole path."""


def use(name: str) -> None:
    """Load a plug-in by module name or .py file, here and in every process that is started from here."""
    known = [part for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    module = module_of(name)
    if name.endswith(".py") and not Path(name).is_file():
        raise UserError(f"plug-in {name}: there is no such file")
    _find_in(str(Path(name).resolve().parent) if name.endswith(".py") else os.getcwd())
    if name.endswith(".py"):
        _check_found(module, Path(name).resolve())
    _load(module)
    _asked_for[module] = str(Path(name).resolve()) if name.endswith(".py") else name
    if module not in known:
        os.environ[VARIABLE] = os.pathsep.join([*known, module])


def loaded() -> list[str]:
    return list(_loaded)


def asked_for() -> list[str]:
    """What `--import` must name to have them again. Installed ones come by themselves."""
    variable = [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name in _loaded]
    return [_asked_for.get(module, module) for module in dict.fromkeys([*variable, *_asked_for])]


def options(names: Iterable[str] | None = None) -> str:
    """The same as words of a command line, to be put behind it."""
    return "".join(f" --import {shlex.quote(name)}" for name in (asked_for() if names is None else names))


def not_loaded(names: Iterable[str]) -> list[str]:
    return [name for name in names if module_of(name) not in _loaded]


def module_of(name: str) -> str:
    """A plug-in's module, also where it was named by its file."""
    return Path(name).stem if name.endswith(".py") else name


def load_all() -> None:
    """What is installed, and what the variable names. Called again, it does nothing."""
    for entry in entry_points(group=GROUP):
        _load(entry.value.partition(":")[0], f" (the entry point {entry.name!r})")
    for name in os.environ.get(VARIABLE, "").split(os.pathsep):
        if name:
            _load(name)


@cache
def code_of(module: str) -> str:
    """What a plug-in computes, as far as can be told: the hash of its file, or of all files of its package; empty for
    what comes with fedsweep. It is part of a trial's key, so that a changed plug-in never takes up the results of
    another."""
    parents = ["", *itertools.accumulate(module.split("."), "{}.{}".format)]
    owner = next((name for name in reversed(parents) if name in _loaded), None)
    if owner is None:
        return ""
    found = _loaded[owner]
    files = [file for folder in getattr(found, "__path__", []) for file in sorted(Path(folder).rglob("*.py"))]
    text = "".join(file.read_text(encoding="utf-8") for file in files) if files else inspect.getsource(found)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_found(module: str, file: Path) -> None:
    """Python finds modules by their name: another of that name would be taken instead, without a word."""
    found = importlib.util.find_spec(module)
    if found is not None and found.origin and Path(found.origin).resolve() != file:
        raise UserError(
            f"plug-in {file}: there is a module {module!r} already, {found.origin}; give the file another name"
        )


def _find_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, folder])


def _load(name: str, why: str = "") -> None:
    if name in _loaded:
        return
    from trainables import methods  # which looks here for what it does not know

    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever the plug-in does wrong
        raise UserError(f"plug-in {name}{why} cannot be imported: {type(error).__name__}: {error}") from error
    _loaded[name] = module
    code_of.cache_clear()
    methods.add_all(module)
