"""`fedsweep status`."""

from __future__ import annotations

import typer

from orchestrator.commands.options import Folder, Json
from orchestrator.console import emit_json


def status(folder: Folder, json: Json = False) -> None:
    """Say how far the study of a result folder has come, also while it runs."""
    from orchestrator.results import status as standing

    found = standing.read(folder)
    if json:
        emit_json(found)
    else:
        typer.echo(standing.as_text(found))
