"""`fedsweep compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Result folders, or folders of result folders.")
    ],
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write; default: DIR/compare.")] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write all of it as one page.")] = None,
    made: Annotated[str, typer.Option(help="A sentence for that page: how the results came about.")] = "",
) -> None:
    """Set the papers' tables beside ours: every entry, the difference, what the eps buys, and findings in words."""
    from orchestrator.reproduction import write_comparison

    for path in write_comparison(folders, to or folders[0] / "compare", page, made):
        typer.echo(path)
