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
    from orchestrator.results.forgetting import counts_are_right, damaged_trials, forget_damaged

    damaged, counted = damaged_trials(folder), counts_are_right(folder)
    for key in damaged:
        echo(f"damaged: trial {key!r:.50}")
    if not counted:
        echo("damaged: the counts of trials that status shows")
    if (damaged or not counted) and repair:
        forgotten = forget_damaged(folder)
        stderr.print(
            f"{forgotten.trials} trials are forgotten, and {forgotten.stages} stages are decided again; to run them: "
            f"{plugins.command('resume', str(folder))}"
        )
    elif damaged or not counted:
        repairs, resumes = plugins.command("check", str(folder), "--repair"), plugins.command("resume", str(folder))
        stderr.print(f"to run damaged trials again: {repairs}, then {resumes}")
        raise typer.Exit(1)
    else:
        echo("every recorded trial matches its checksum")
