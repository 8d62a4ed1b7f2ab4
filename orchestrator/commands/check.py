"""`fedsweep check`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.commands.options import Folder
from orchestrator.console import echo, stderr
from trainables import plugins


def check(
    folder: Folder,
    repair: Annotated[
        bool, typer.Option("--repair", help="Forget damaged trials, so that `fedsweep resume` runs them again.")
    ] = False,
) -> None:
    """Verify the checksums of all recorded trials. Exits with 1 if one is damaged."""
    from orchestrator.results.forgetting import damaged_trials, forget_damaged

    damaged = damaged_trials(folder)
    for key in damaged:
        echo(f"damaged: trial {key!r:.50}")
    if damaged and repair:
        forgotten = forget_damaged(folder)
        stderr.print(
            f"{forgotten.trials} trials are forgotten, and {forgotten.stages} stages are decided again; to run them: "
            f"fedsweep resume {folder}{plugins.import_options()}"
        )
    elif damaged:
        stderr.print(f"to run them again: fedsweep check {folder} --repair, then fedsweep resume {folder}")
        raise typer.Exit(1)
    else:
        echo("every recorded trial matches its checksum")
