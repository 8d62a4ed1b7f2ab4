"""The metrics by name: files of this package, and those of plug-ins."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from types import ModuleType

from trainables import plugins
from trainables.errors import LOAD_A_PLUGIN, UserError, choices
from trainables.metrics.base import BuiltIn, Metric

METRICS: dict[str, Metric] = {}


def add_all(module: ModuleType) -> None:
    """Register every metric that a module defines."""
    for value in vars(module).values():
        is_own = isinstance(value, type) and issubclass(value, Metric) and value.__module__ == module.__name__
        if not is_own or inspect.isabstract(value) or not hasattr(value, "name"):
            continue
        known = METRICS.get(value.name)
        if known is not None and type(known) is not value:
            where = type(known).__module__
            raise UserError(f"plug-in {module.__name__}: a metric {value.name!r} exists already, in {where}")
        METRICS[value.name] = value()


for _module in pkgutil.iter_modules(__path__):
    add_all(importlib.import_module(f"{__name__}.{_module.name}"))
METRICS = dict(sorted(METRICS.items()))
plugins.on_load(add_all)


def not_built_in(names: Iterable[str]) -> tuple[str, ...]:
    """The metrics among `names` that are not part of every evaluation."""
    return tuple(name for name in names if not isinstance(get(name), BuiltIn))


def get(name: str) -> Metric:
    if name not in METRICS:
        plugins.load_all()  # a Ray worker has not loaded them yet
    if name not in METRICS:
        raise UserError(f"metric = {name!r} is unknown; {choices(name, METRICS)}{LOAD_A_PLUGIN}")
    return METRICS[name]
