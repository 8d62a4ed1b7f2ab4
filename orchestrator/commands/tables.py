"""`fedsweep tables`."""

from __future__ import annotations

import typer

from orchestrator.commands.options import Folder
from orchestrator.commands.sweep import warn_if_unfinished


def tables(folder: Folder) -> None:
    """Rebuild the tables of a results folder from its ledger."""
    from orchestrator.execution.study_run import rebuild_tables

    warn_if_unfinished(folder)
    for path in rebuild_tables(folder):
        typer.echo(path)
