"""`fedsweep compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.console import echo
from trainables.files import subfolder


def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Results folders, or folders of results folders.")
    ],
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Output folder.  [default: DIR/compare]")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a summary with links to the details.")
    ] = None,
    made: Annotated[str, typer.Option(help="How the results were made, for the summary.")] = "",
) -> None:
    """Compare results with the papers' tables. Shows every entry, the difference, the actual eps and findings."""
    from orchestrator.reproduction import write_comparison

    for path in write_comparison(folders, to or subfolder(folders[0], "compare"), page, made):
        echo(path)
