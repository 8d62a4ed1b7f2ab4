"""The catalogue of methods, by name. A method's module is named after it: dp-fedgd lives in dp_fedgd.py."""

from __future__ import annotations

import importlib
import pkgutil

from trainables.errors import one_of
from trainables.methods.base import Method


def catalogue() -> dict[str, Method]:
    """Every method there is, found by looking into this package."""
    found: dict[str, Method] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        loaded = importlib.import_module(f"{__name__}.{module}")
        for value in vars(loaded).values():
            if isinstance(value, type) and issubclass(value, Method) and value.__module__ == loaded.__name__:
                if value is not Method:
                    found[value.name] = value()
    return found


METHODS: dict[str, Method] = catalogue()


def get(name: str) -> Method:
    one_of(METHODS, method=name)
    return METHODS[name]
