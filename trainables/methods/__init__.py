"""The registry of methods by name. A method is a module of this package (dp-fedgd: dp_fedgd.py) or of a plug-in."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

from trainables import plugins
from trainables.errors import UserError, one_of
from trainables.methods.base import Method


def defined_in(module: ModuleType) -> list[Method]:
    """The methods that a module defines itself, or that a package imports from one of its own modules."""
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Method)
        and f"{value.__module__}.".startswith(f"{module.__name__}.")
    ]
    return [value() for value in classes if not inspect.isabstract(value)]


_MODULES = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
METHODS: dict[str, Method] = {
    method.name: method
    for method in sorted((method for module in _MODULES for method in defined_in(module)), key=lambda m: m.name)
}


@plugins.on_load
def add_all(module: ModuleType) -> None:
    """Register the methods of a plug-in."""
    for method in defined_in(module):
        known = METHODS.get(method.name)
        if known is not None and type(known) is not type(method):
            where = type(known).__module__
            raise UserError(f"plug-in {module.__name__}: a method {method.name!r} is there already, in {where}")
        METHODS[method.name] = method


def get(name: str) -> Method:
    if name not in METHODS:
        plugins.load_all()  # a Ray worker has not loaded them yet
        one_of(METHODS, method=name)
    return METHODS[name]
