"""`fedsweep merge`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.console import stderr
from trainables import plugins


def merge(
    parts: Annotated[list[str], typer.Argument(metavar="DIR", help="Results folders of one study, or their URLs.")],
    results: Annotated[str, typer.Option(metavar="DIR", help="Folder or URL for the merged results.")],
) -> None:
    """Merge results of a study that ran in parts. `run --shard` makes parts; `resume` runs missing trials."""
    from orchestrator.execution.merging import merge as merge_folders

    merge_folders(parts, results)
    command = plugins.command("resume", results)
    stderr.print(f"{len(parts)} results folders were merged into {results}; to run missing trials: {command}")
