"""`fedsweep serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.commands.options import Folder
from orchestrator.console import echo


def serve(
    folder: Folder,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Local port; 0 picks a free one.")] = 8330,
) -> None:
    """Serve the report of a results folder to local browsers. The page is updated while the sweep runs."""
    from orchestrator.console import stderr
    from orchestrator.report.html import serving

    with serving.server(folder, port) as http:
        echo(http.address)
        stderr.print("press Ctrl-C to stop; the sweep is not affected")
        try:
            http.serve_forever()
        except KeyboardInterrupt:
            return
