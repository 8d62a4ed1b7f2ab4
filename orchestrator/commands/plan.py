"""`fedsweep plan`."""

from __future__ import annotations

import typer

from orchestrator.commands.options import Json, StudyName
from orchestrator.console import emit_json


def plan(study: StudyName = "quickstart", json: Json = False) -> None:
    """Say what a study would run, in how many packs, and about how long it would take. Runs nothing."""
    from orchestrator.running import planning
    from orchestrator.study import reading

    loaded, _ = reading.load(study)
    found = planning.plan(loaded)
    if json:
        emit_json(found.as_dict())
    else:
        typer.echo(found.as_text())
