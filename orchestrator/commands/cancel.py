"""`fedsweep cancel`."""

from __future__ import annotations

from orchestrator.commands.options import Folder
from orchestrator.console import stderr
from trainables import plugins


def cancel(folder: Folder) -> None:
    """Ask whoever runs a study, on whatever machine, to finish the packs in flight and end. `resume` goes on."""
    from orchestrator.results import status
    from orchestrator.results.locations import results_location
    from trainables.errors import UserError

    holder = status.read(folder)["running"]
    if holder is None:
        raise UserError(f"nobody runs the study in {folder}")
    results_location(folder).request_stop()
    stderr.print(f"{holder} was asked to stop; to go on later: fedsweep resume {folder}{plugins.import_options()}")
