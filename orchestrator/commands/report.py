"""`fedsweep report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands.options import Folder


def report(
    folder: Folder,
    other: Annotated[
        str | None, typer.Argument(metavar="[DIR2]", help="A second result folder, to compare the first with.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it; default: report.html in DIR.")
    ] = None,
) -> None:
    """Write report.html: all results of a folder on one page that opens offline; of two folders, compared."""
    from orchestrator.report.html import write_report

    typer.echo(write_report([folder] if other is None else [folder, other], output))
