"""`fedsweep status`."""

from __future__ import annotations

import typer

from orchestrator.commands.options import Folder, Json
from orchestrator.console import emit_json


def status(folder: Folder, json: Json = False) -> None:
    """Show the progress of a study, also while it runs."""
    from orchestrator.results import status as progress

    report = progress.read(folder)
    if json:
        emit_json(report)
    else:
        typer.echo(progress.as_text(report))
