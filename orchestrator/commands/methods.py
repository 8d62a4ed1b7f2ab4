"""`fedsweep methods`."""

from __future__ import annotations

import math

import typer

from orchestrator.commands.options import Json
from orchestrator.console import emit_json


def methods(json: Json = False) -> None:
    """List methods, hyperparameters, defaults and papers."""
    from trainables.methods import METHODS

    if json:
        emit_json(
            [
                {
                    "name": method.name,
                    "title": method.title,
                    "paper": method.paper,
                    "levels": list(method.levels),
                    "releases": method.program(method.check({})).name,
                    "hyperparameters": [
                        {
                            "name": h.name,
                            "default": h.default,
                            "description": h.description,
                            "choices": list(h.choices) or None,
                            "low": h.low if math.isfinite(h.low) else None,
                            "high": h.high if math.isfinite(h.high) else None,
                        }
                        for h in method.hyperparameters
                    ],
                }
                for method in METHODS.values()
            ]
        )
        return
    for method in METHODS.values():
        typer.echo(f"{method.name}  ({method.title}; {method.paper})")
        for h in method.hyperparameters:
            typer.echo(f"    {h.name} = {h.default}    {h.description}")
