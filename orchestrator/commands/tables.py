"""`fedsweep tables`."""

from __future__ import annotations

import typer

from orchestrator.commands.options import Folder


def tables(folder: Folder) -> None:
    """Rebuild the tables of a result folder from its ledger."""
    from orchestrator.running.sweeping import rebuild_tables

    for path in rebuild_tables(folder):
        typer.echo(path)
