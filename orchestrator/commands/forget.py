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
    """Forget all trials that a node computed. `fedsweep resume` runs them again. Later stages run again only if the
    new results change them."""
    from orchestrator.results.forgetting import forget_node

    forgotten = forget_node(folder, node)
    stderr.print(
        f"forgot {forgotten.trials} trials of node {node}; {forgotten.stages} stages will be decided again. To run the "
        f"trials again and update the tables: {plugins.command('resume', str(folder))}"
    )
