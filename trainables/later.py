"""Torch, imported when it is first touched: that takes seconds, and whoever only plans has no use for it."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Later(ModuleType):
        def __getattr__(self, name: str) -> Any:
            import torch

            vars(self).update(vars(torch))  # from now on it is found as fast as there
            return getattr(torch, name)

    torch = _Later("torch")
