"""`fedsweep methods`."""

from __future__ import annotations

import math

from orchestrator.commands.options import Json
from orchestrator.console import show


def methods(json: Json = False) -> None:
    """List methods, hyperparameters, defaults and papers."""
    from trainables.methods import METHODS

    lines, rows = [], []
    for method in METHODS.values():
        lines.append(f"{method.name}  ({method.title}; {method.paper})")
        lines += [f"    {h.name} = {h.default}    {h.description}" for h in method.hyperparameters]
        hyperparameters = [
            {
                **{name: getattr(h, name) for name in ("name", "default", "description")},
                "choices": list(h.choices) or None,
                "low": h.low if math.isfinite(h.low) else None,
                "high": h.high if math.isfinite(h.high) else None,
            }
            for h in method.hyperparameters
        ]
        rows.append(
            {
                **{name: getattr(method, name) for name in ("name", "title", "paper", "levels")},
                "releases": method.program(method.check({})).name,
                "hyperparameters": hyperparameters,
            }
        )
    show(rows, json, lines)
