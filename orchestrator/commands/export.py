"""`fedsweep export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands.options import Folder
from orchestrator.commands.sweep import output_errors, warn_if_unfinished
from orchestrator.console import echo
from trainables.errors import UserError
from trainables.files import subfolder


class Format(StrEnum):
    PARQUET = "parquet"
    CSV = "csv"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"
    OPTUNA = "optuna"


def export(
    folder: Folder,
    to: Annotated[
        Format,
        typer.Option(
            "--to", help="Format or tool; parquet: every trial by round and a data card, to benchmark tuners."
        ),
    ] = Format.PARQUET,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output folder.  [default: DIR/export, or a folder in it]")
    ] = None,
) -> None:
    """Export trials to files or other tools. Works while the sweep runs."""
    from orchestrator.report.benchmark.export import write_export
    from orchestrator.report.export import export as write
    from orchestrator.results.ledger import Ledger
    from orchestrator.results.locations import results_location

    if "://" in folder and (out is None or to is Format.PARQUET):
        raise UserError(f"{folder} is a URL; --to {to.value} needs a local results folder")
    if to is Format.PARQUET:
        with output_errors("--out"):
            for path in write_export(Path(folder), out or subfolder(Path(folder), "export")):
                echo(path)
        return
    if to in (Format.MLFLOW, Format.WANDB):
        _check_current_folder(to, folder)
    warn_if_unfinished(folder)
    with output_errors("--out"), results_location(folder).open_for_reading() as read, Ledger.read(read) as ledger:
        for written in write(ledger, to.value, out or subfolder(Path(folder), "export", to.value)):
            echo(written)


def _check_current_folder(to: Format, folder: str) -> None:
    """Refuse to run inside the results folder: trackers read relative paths there, and its files may be untrusted."""
    if "://" not in folder and Path.cwd().resolve().is_relative_to(Path(folder).resolve()):
        raise UserError(
            f"--to {to.value} uses files in the current folder, which is part of {folder}; run it in another folder"
        )
