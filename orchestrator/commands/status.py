"""`fedsweep status`."""

from __future__ import annotations

from orchestrator.commands.options import Folder, Json
from orchestrator.console import show


def status(folder: Folder, json: Json = False) -> None:
    """Show the progress of a study, also while it runs."""
    from orchestrator.results import status as progress

    report = progress.read(folder)
    show(report, json, [progress.as_text(report)])
