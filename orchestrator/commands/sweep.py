"""What commands on sweeps share."""

from __future__ import annotations

from typing import Any

import typer

from orchestrator.commands.options import seconds_of, shard_of
from orchestrator.console import emit_json, stderr
from trainables import plugins


def run(
    study: Any,
    text: str,
    folder: str,
    address: str | None,
    resource: list[str] | None,
    stop_after: str | None,
    shard: str | None,
    json: bool,
) -> None:
    from orchestrator.execution import study_run
    from orchestrator.execution.progress import JsonView, LineView, LiveView
    from orchestrator.study.reading import changed_resources

    again = f"{folder}{plugins.import_options()}"
    view = JsonView() if json else LiveView() if stderr.is_terminal else LineView()
    try:
        resources = changed_resources(study.resources, resource or [])
        limits: Any = {"stop_after_s": seconds_of(stop_after), "shard": shard_of(shard)}
        finished = study_run.run(study, text, folder, view, address, resources, **limits)
    except KeyboardInterrupt:
        stderr.print(f"stopped; nothing finished is lost. To go on: fedsweep resume {again}")
        raise
    if json:
        event = "finished" if finished.complete else "stopped"
        emit_json({"event": event, "folder": folder, "failed": finished.failed, "tables": finished.tables})
    elif finished.complete:
        typer.echo(finished.page)
        stderr.print(f"tables are in {folder}/tables, the chosen values in {folder}/best.yaml")
        stderr.print(f"all on one page to look at: fedsweep report {again}")
    if finished.failed:
        stderr.print(f"{finished.failed} trials failed; fedsweep status {again} says why")
    if not finished.complete:
        stderr.print(f"stopped before the end; nothing finished is lost. To go on: fedsweep resume {again}")
        raise typer.Exit(130)
    if finished.failed:
        raise typer.Exit(1)


def say_if_unfinished(folder: str) -> None:
    """What is shown of a sweep that has not ended is not its result."""
    from orchestrator.results import status

    found = status.read(folder)
    if not found["finished"]:
        ended, total, again = found["cells_ended"], found["cells_total"], f"{folder}{plugins.import_options()}"
        stderr.print(f"the study is not finished: {ended} of {total} cells have ended; fedsweep status {again}")
