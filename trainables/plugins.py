"""Loads plug-ins: Python modules that add methods, models, data sources, partitions and so on.

A plug-in is loaded if
1. an installed package lists it as an entry point of the group `fedsweep.plugins`, or
2. the user names it: `fedsweep --import MODULE`, or the variable FEDSWEEP_IMPORT, which Ray workers inherit.

The folder of a plug-in is searched last, after the standard library and the installed packages, on workers too.

A registry that collects classes from plug-ins subscribes with `on_load`; the decorators of `fedsweep.plugins` register
everything else. This module imports no registry, so registries can import it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import itertools
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from trainables.errors import UserError
from trainables.urls import shown_url

GROUP = "fedsweep.plugins"
VARIABLE = "FEDSWEEP_IMPORT"
FOLDERS = "FEDSWEEP_IMPORT_FOLDERS"
"""The folders of the plug-ins. Not PYTHONPATH: Python searches it before everything else."""
_loaded: dict[str, ModuleType] = {}
_requested: dict[str, str] = {}
"""Module name -> what `use` was called with; files as absolute paths."""
_collectors: list[Callable[[ModuleType], None]] = []


def on_load(collect: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Call `collect` with every plug-in module: those already loaded, and each later one. Usable as a decorator."""
    _collectors.append(collect)
    for module in list(_loaded.values()):
        collect(module)
    return collect


def use(name: str) -> None:
    """Load a plug-in by module name or .py file, in this process and in every process started from it."""
    module, is_file = module_name(name), name.endswith(".py")
    path = Path(name).resolve()
    if is_file and not path.is_file():
        raise UserError(f"plug-in {name}: there is no such file")
    if is_file:
        _search_last(str(path.parent))
        _check_not_shadowed(module, path)
    elif not _can_be_found(module):
        _search_last(os.getcwd())
    _load(module)
    _requested[module] = str(path) if is_file else name
    _pass_on(VARIABLE, module)
    if folder := _folder(module):
        _pass_on(FOLDERS, folder)


def use_function(name: str) -> tuple[Callable[[], object], str]:
    """Load a function that the user names, MODULE:FUNCTION or FILE.py:FUNCTION. Returns it and the hash of its
    plug-in's code."""
    module, _, function = name.rpartition(":")
    if not module or not function:
        raise UserError(f"{name!r} names no function; write MODULE:FUNCTION or FILE.py:FUNCTION")
    use(module)
    found = getattr(_loaded[module_name(module)], function, None)
    if not callable(found):
        raise UserError(f"plug-in {module} has no function {function!r}")
    return found, code_hash(module_name(module))


def load_all() -> None:
    """Load the installed plug-ins and those that FEDSWEEP_IMPORT names; repeated calls do nothing."""
    for entry in entry_points(group=GROUP):
        _load(entry.value.partition(":")[0], f" (the entry point {entry.name!r})")
    for name in _inherited():
        _load(name)


def loaded() -> list[str]:
    return list(_loaded)


def not_loaded(names: Iterable[str]) -> list[str]:
    return [name for name in names if module_name(name) not in _loaded]


def requested() -> list[str]:
    """The plug-ins that `--import` must name to load the same ones again; installed ones load by themselves."""
    inherited = [name for name in _inherited() if name in _loaded]
    return [_requested.get(module, module) for module in dict.fromkeys([*inherited, *_requested])]


def import_options(names: Iterable[str] | None = None) -> str:
    """These plug-ins (by default the requested ones) as options to append to a command line."""
    return "".join(f" --import {shlex.quote(name)}" for name in (requested() if names is None else names))


def command(*words: str) -> str:
    """A command of fedsweep with these plug-ins, quoted for a shell. Credentials are removed word by word: in the
    whole line, a quote after a URL could be removed with them."""
    return f"fedsweep {shlex.join(map(shown_url, words))}{import_options()}"


def module_name(name: str) -> str:
    """The module of a plug-in given by module name or .py file."""
    return Path(name).stem if name.endswith(".py") else name


@cache
def code_hash(module: str) -> str:
    """Hash of the plug-in that contains `module`: its file, or all files of its package; "" for fedsweep's own modules.

    It is part of a trial's key, so results of an older version of a plug-in are not reused."""
    parents = itertools.accumulate(module.split("."), "{}.{}".format)
    plugin = next((_loaded[name] for name in reversed(list(parents)) if name in _loaded), None)
    if plugin is None:
        return ""
    files = [file for folder in getattr(plugin, "__path__", []) for file in sorted(Path(folder).rglob("*.py"))]
    text = "".join(file.read_text(encoding="utf-8") for file in files) if files else inspect.getsource(plugin)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_hashes() -> dict[str, str]:
    """By module name, for the plug-ins that are loaded."""
    return {name: code_hash(name) for name in _loaded}


def changed(recorded: Mapping[str, str]) -> list[str]:
    """The plug-ins whose code differs from these hashes."""
    return [name for name, code in code_hashes().items() if recorded.get(name, code) != code]


def explain(error: Exception) -> str:
    """For an exception in the code of a plug-in: its place in one sentence, then the plug-in's part of the traceback.
    Empty for other exceptions."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [number for number, frame in enumerate(frames) if _plugin_of(frame.filename)]
    if not own:
        return ""
    place = frames[own[-1]]
    trace = "".join(traceback.format_list(frames[own[0] :])).rstrip()
    summary = "".join(traceback.format_exception_only(error)).strip()
    sentence = f"plug-in {place.filename}:{place.lineno}: {summary.splitlines()[0].rstrip('.')}."
    return f"{sentence}\nTraceback (most recent call last):\n{trace}\n{summary}"


def _plugin_of(file: str) -> str | None:
    """The loaded plug-in that a source file belongs to."""
    for name, module in _loaded.items():
        folders = [str(Path(folder).resolve()) for folder in getattr(module, "__path__", [])]
        if file == getattr(module, "__file__", None) or any(Path(file).is_relative_to(folder) for folder in folders):
            return name
    return None


def environment() -> dict[str, str]:
    """The variables that tell another process which plug-ins to load."""
    return {name: os.environ[name] for name in (VARIABLE, FOLDERS) if os.environ.get(name)}


def _inherited(variable: str = VARIABLE) -> list[str]:
    return [name for name in os.environ.get(variable, "").split(os.pathsep) if name]


def _pass_on(variable: str, value: str) -> None:
    """Add a value to the list in a variable that child processes inherit."""
    inherited = _inherited(variable)
    if value not in inherited:
        os.environ[variable] = os.pathsep.join([*inherited, value])


def _check_not_shadowed(module: str, file: Path) -> None:
    """Python imports by name: another module of the same name would silently be imported instead of the file."""
    found = importlib.util.find_spec(module)
    if found is not None and found.origin and Path(found.origin).resolve() != file:
        raise UserError(
            f"plug-in {file}: there is a module {module!r} already, {found.origin}; give the file another name"
        )


def _can_be_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name does not exist
        return False
    except Exception:  # a package that cannot be imported: loading it reports the error
        return True


def _folder(module: str) -> str:
    """Where the module, or the package that contains it, was found."""
    spec = sys.modules[module.partition(".")[0]].__spec__
    if spec is None:
        return ""
    if spec.submodule_search_locations:
        return str(Path(next(iter(spec.submodule_search_locations))).resolve().parent)
    return str(Path(spec.origin).resolve().parent) if spec.has_location and spec.origin else ""


def _search_last(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def _file_of(module: str) -> str | None:
    with contextlib.suppress(Exception):  # a parent package may fail to load
        found = importlib.util.find_spec(module)
        return found.origin if found else None
    return None


def _load(name: str, origin: str = "") -> None:
    if name in _loaded:
        return
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a plug-in may raise anything
        file = _file_of(name)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        place = f"{file}:{lines[-1]}: " if lines else ""
        raise UserError(f"plug-in {name}{origin} cannot be imported: {place}{type(error).__name__}: {error}") from error
    _loaded[name] = module
    code_hash.cache_clear()
    for collect in _collectors:
        collect(module)


for _inherited_folder in _inherited(FOLDERS):
    _search_last(_inherited_folder)
