"""The catalogue of methods, by name. A method's module is named after it: dp-fedgd lives in dp_fedgd.py."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from trainables.errors import one_of
from trainables.methods.base import Method


def catalogue() -> dict[str, Method]:
    """Every method there is, found by looking into this package."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    classes = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Method) and value.__module__ == module.__name__
    ]
    named = [value() for value in classes if not inspect.isabstract(value)]
    return {method.name: method for method in sorted(named, key=lambda method: method.name)}


METHODS: dict[str, Method] = catalogue()


def get(name: str) -> Method:
    one_of(METHODS, method=name)
    return METHODS[name]
