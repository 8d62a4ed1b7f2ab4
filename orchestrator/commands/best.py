"""`fedsweep best`."""

from __future__ import annotations

import typer

from orchestrator.commands.options import Folder, Json
from orchestrator.console import emit_json


def best(folder: Folder, json: Json = False) -> None:
    """Print the chosen configuration of every cell."""
    from orchestrator.running.sweeping import chosen_cells

    cells = chosen_cells(folder)
    if json:
        emit_json(cells)
        return
    for cell, chosen in cells.items():
        values = ", ".join(f"{name}={value}" for name, value in chosen["hyperparameters"].items())
        typer.echo(f"{cell}\n    {values}")
    typer.echo(f"\nto train one again: fedsweep train --from {folder}/best.yaml --cell NAME --seed 42")
