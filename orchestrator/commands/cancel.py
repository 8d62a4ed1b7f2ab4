"""`fedsweep cancel`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.commands.options import Folder
from orchestrator.console import stderr
from trainables import plugins


def cancel(
    folder: Folder,
    now: Annotated[
        bool, typer.Option("--now", help="Stop at once: packs in flight continue from their last checkpoints later.")
    ] = False,
) -> None:
    """Stop a running sweep after its current packs. It may run on another machine; `fedsweep resume` continues it."""
    from orchestrator.results import status
    from orchestrator.results.locations import results_location
    from trainables.errors import UserError

    runner = status.read(folder)["running"]
    if runner is None:
        raise UserError(f"no sweep is running in {folder}")
    results_location(folder).request_stop(now)
    how = "stop now" if now else "stop"
    stderr.print(f"{runner} was asked to {how}; to continue later: {plugins.command('resume', folder)}")
