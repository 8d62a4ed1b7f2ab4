"""The catalogue of methods, by name. A method's module is named after it: dp-fedgd lives in dp_fedgd.py."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

from trainables import plugins
from trainables.errors import UserError, one_of
from trainables.methods.base import Method


def catalogue() -> dict[str, Method]:
    """Every method there is, found by looking into this package."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    named = [method for module in modules for method in defined_in(module)]
    return {method.name: method for method in sorted(named, key=lambda method: method.name)}


def defined_in(module: ModuleType) -> list[Method]:
    """The methods that a module itself defines, or a package in one of its modules and names."""
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Method)
        and f"{value.__module__}.".startswith(f"{module.__name__}.")
    ]
    return [value() for value in classes if not inspect.isabstract(value)]


METHODS: dict[str, Method] = catalogue()


def add_all(module: ModuleType) -> None:
    """The methods of a plug-in, beside those of the package."""
    for method in defined_in(module):
        known = METHODS.get(method.name)
        if known is not None and type(known) is not type(method):
            where = type(known).__module__
            raise UserError(f"plug-in {module.__name__}: a method {method.name!r} is there already, in {where}")
        METHODS[method.name] = method


def get(name: str) -> Method:
    if name not in METHODS:
        plugins.load_all()  # in a Ray worker nobody has asked for them yet
        one_of(METHODS, method=name)
    return METHODS[name]
