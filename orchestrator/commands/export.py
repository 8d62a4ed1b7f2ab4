"""`fedsweep export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    PARQUET = "parquet"


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A result folder.")],
    to: Annotated[Format, typer.Option("--to", help="The form of the table.")] = Format.PARQUET,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write; default: DIR/export.")] = None,
) -> None:
    """Write every trial by round as one table with a data card: a benchmark to test tuners on."""
    from orchestrator.report.benchmark.export import write_export

    for path in write_export(folder, out or folder / "export"):
        typer.echo(path)
