"""`fedsweep forget`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.commands.options import Folder
from orchestrator.console import stderr
from trainables import plugins


def forget(
    folder: Folder,
    node: Annotated[str, typer.Option(metavar="NAME", help="Name of the node, as `fedsweep status` lists it.")],
) -> None:
    """Forget the trials that a node has computed. `fedsweep resume` runs them again, and stages that depend on them
    if their results change."""
    from orchestrator.results.forgetting import forget_node

    forgotten = forget_node(folder, node)
    stderr.print(
        f"{forgotten.trials} trials of node {node} are forgotten, and {forgotten.stages} stages are decided again; the "
        f"tables change with: {plugins.command('resume', str(folder))}"
    )
