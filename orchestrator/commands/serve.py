"""`fedsweep serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.commands.options import Folder


def serve(
    folder: Folder,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0: whichever is free.")] = 8330,
) -> None:
    """Show the report of a result folder in a browser, following the sweep while it runs; on this machine alone."""
    from orchestrator.console import stderr
    from orchestrator.report.html import serving

    with serving.server(folder, port) as running:
        typer.echo(f"http://{serving.LOOPBACK}:{running.server_address[1]}/")
        stderr.print("Ctrl-C ends it; the sweep does not mind")
        try:
            running.serve_forever()
        except KeyboardInterrupt:
            return
