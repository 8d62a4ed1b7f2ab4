"""`fedsweep figures`."""

from __future__ import annotations

import typer

from orchestrator.commands.options import Folder
from orchestrator.commands.sweep import say_if_unfinished


def figures(folder: Folder) -> None:
    """Draw the figures of a result folder from its ledger: the score by round, by budget, by number of clients."""
    from orchestrator.execution.study_run import draw_figures

    say_if_unfinished(folder)
    for path in draw_figures(folder):
        typer.echo(path)
