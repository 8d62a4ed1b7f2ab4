"""Libraries that are slow to import, imported on first use.

torch takes seconds, and commands such as `plan` do not need it. scipy.special takes 0.2 s, and only the privacy
accounting needs it: client hosts and slots do not."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from scipy import special as special
else:

    class _LazyModule(ModuleType):
        def __getattr__(self, name: str) -> Any:
            module = importlib.import_module(self.__name__)
            vars(self).update(vars(module))  # later lookups do not call this method
            return getattr(module, name)

        def __reduce__(self) -> tuple[Any, ...]:
            """Pickled by name, for functions that Ray serialises together with their globals."""
            return importlib.import_module, (self.__name__,)

    torch, special = _LazyModule("torch"), _LazyModule("scipy.special")
