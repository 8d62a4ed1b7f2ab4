"""The search strategies, by name: one file each in this package, and those of plug-ins."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

from orchestrator.search.plugin_checks import check_class, with_checks
from orchestrator.search.strategies.base import Strategy
from trainables import plugins
from trainables.errors import UserError

STRATEGIES: dict[str, Strategy] = {}


def add_all(module: ModuleType) -> None:
    """Register every strategy that a module defines."""
    for value in vars(module).values():
        is_own = isinstance(value, type) and issubclass(value, Strategy) and value.__module__ == module.__name__
        if not is_own or value is Strategy or (inspect.isabstract(value) and "name" not in vars(value)):
            continue  # an abstract class without a name is a base of others
        check_class(value)
        if value.publishes_only_winner and not module.__name__.startswith(f"{__name__}."):
            raise UserError(
                f"plug-in {module.__name__}: strategy {value.name!r} sets publishes_only_winner; the privacy cost of a "
                "published winner is known only for the strategy 'private'"
            )
        known = STRATEGIES.get(value.name)
        if known is not None and type(known) is not value:
            where = type(known).__module__
            raise UserError(f"plug-in {module.__name__}: a strategy {value.name!r} exists already, in {where}")
        taken = {stage: s.name for s in STRATEGIES.values() if s is not known for stage in s.stages}
        for stage in value.stages:
            if stage in taken or stage in ("contest", "confirm"):
                owner = f"strategy {taken[stage]}" if stage in taken else "fedsweep"
                raise UserError(
                    f"plug-in {module.__name__}: stage name {stage!r} of strategy {value.name} is taken by {owner}; "
                    "choose another"
                )
        STRATEGIES[value.name] = value() if module.__name__.startswith(f"{__name__}.") else with_checks(value())


for _module in pkgutil.iter_modules(__path__):
    add_all(importlib.import_module(f"{__name__}.{_module.name}"))
plugins.on_load(add_all)
