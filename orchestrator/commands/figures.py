"""`fedsweep figures`."""

from __future__ import annotations

from orchestrator.commands.options import Folder
from orchestrator.commands.sweep import warn_if_unfinished
from orchestrator.console import echo


def figures(folder: Folder) -> None:
    """Draw the figures of a results folder. Scores by round, by budget and by number of clients."""
    from orchestrator.execution.study_run import draw_figures

    warn_if_unfinished(folder)
    for path in draw_figures(folder):
        echo(path)
