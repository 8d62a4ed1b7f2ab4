"""`fedsweep plan`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from orchestrator.commands.options import Json, Resources, StudyName
from orchestrator.console import show


def plan(
    study: StudyName = "quickstart",
    address: Annotated[
        str | None,
        typer.Option(help="Plan for the Ray cluster at this address (auto or HOST:PORT).  [default: this machine]"),
    ] = None,
    resource: Resources = None,
    json: Json = False,
) -> None:
    """Show what a study would run, without running it. Prints trials, packs, memory and estimated time."""
    from orchestrator.execution import planning
    from orchestrator.study import reading

    loaded, text = reading.load(study)
    loaded = loaded.model_copy(update={"resources": reading.changed_resources(loaded.resources, resource or [])})
    with reading.errors_name_lines(text, study):
        planned = planning.plan(loaded, _nodes(address) if address else None)
    show(asdict(planned), json, [planned.as_text()])


def _nodes(address: str) -> list[dict[str, float]]:
    from orchestrator.execution.cluster.connect import connected
    from orchestrator.execution.cluster.nodes import node_resources

    with connected(address):
        return node_resources()
