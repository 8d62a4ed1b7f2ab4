"""`fedsweep merge`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.console import stderr
from trainables import plugins


def merge(
    parts: Annotated[list[str], typer.Argument(metavar="DIR...", help="Result folders of one study, or their URLs.")],
    results: Annotated[str, typer.Option(metavar="DIR", help="The folder, or its URL, that gets all their rows.")],
) -> None:
    """Put parts of a study that were run apart (run --shard) together, and write the tables. `resume` does the rest."""
    from orchestrator.execution.merging import merge as put_together

    put_together(parts, results)
    to_go_on = f"fedsweep resume {results}{plugins.import_options()}"
    stderr.print(f"{len(parts)} result folders are merged into {results}; what is missing: {to_go_on}")
