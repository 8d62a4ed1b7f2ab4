"""`fedsweep report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands.options import Folder
from orchestrator.commands.sweep import output_errors
from orchestrator.console import echo


def report(
    folder: Folder,
    others: Annotated[
        list[str] | None, typer.Argument(metavar="DIR2", help="Results folders to compare with the first.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output file.  [default: DIR/report.html]")
    ] = None,
) -> None:
    """Write an HTML report of one or several results folders. Several are compared. The page works offline."""
    from orchestrator.report.html import write_report

    with output_errors("--output"):
        echo(write_report([folder, *(others or [])], output))
