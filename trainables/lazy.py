"""Libraries that take long to import, imported when they are first touched: torch takes seconds and whoever only plans
has no use for it, `special` of scipy a fifth of one and no client host, nor a slot, prices noise."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from scipy import special as special
else:

    class _Later(ModuleType):
        def __getattr__(self, name: str) -> Any:
            found = importlib.import_module(self.__name__)
            vars(self).update(vars(found))  # from now on it is found as fast as there
            return getattr(found, name)

        def __reduce__(self) -> tuple[Any, ...]:
            """For functions that are sent elsewhere with all they use: it is found there by its name."""
            return importlib.import_module, (self.__name__,)

    torch, special = _Later("torch"), _Later("scipy.special")
