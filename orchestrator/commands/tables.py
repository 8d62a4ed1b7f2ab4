"""`fedsweep tables`."""

from __future__ import annotations

from orchestrator.commands.options import Folder
from orchestrator.commands.sweep import warn_if_unfinished
from orchestrator.console import echo


def tables(folder: Folder) -> None:
    """Rebuild the tables of a results folder from its ledger."""
    from orchestrator.execution.study_run import rebuild_tables

    warn_if_unfinished(folder)
    for path in rebuild_tables(folder):
        echo(path)
