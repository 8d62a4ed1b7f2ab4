"""Sweeps: run, resume, status, plan, tables, figures, best."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.commands.options import Address, Json
from orchestrator.console import emit_json, stderr

app = typer.Typer()

StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="A study file, or the name of a packaged study.")]
Folder = Annotated[str, typer.Argument(metavar="DIR", help="A result folder, or its URL (s3://bucket/folder).")]
Resources = Annotated[
    list[str] | None,
    typer.Option(
        "--resource",
        metavar="KEY=VALUE",
        help="Instead of the study's: hosts, gpus_per_host, lanes_per_pack or placement, for this run; may be "
        "repeated. Never changes a result.",
    ),
]


@app.command()
def run(
    study: StudyName = "quickstart",
    results: Annotated[
        str | None, typer.Option(metavar="DIR", help="The result folder or its URL; default: results/NAME.")
    ] = None,
    address: Address = None,
    resource: Resources = None,
    json: Json = False,
) -> None:
    """Run a study: search every cell, confirm the winners, write the tables. Does only what is missing."""
    from orchestrator import study as studies

    loaded, text = studies.load(study)
    _run(loaded, text, results or str(Path("results") / loaded.name), address, resource, json)


@app.command()
def resume(folder: Folder, address: Address = None, resource: Resources = None, json: Json = False) -> None:
    """Go on with the study of a result folder, however it ended."""
    from orchestrator.sweeping import recorded_study

    loaded, text = recorded_study(folder)
    _run(loaded, text, folder, address, resource, json)


def _run(study: Any, text: str, folder: str, address: str | None, resource: list[str] | None, json: bool) -> None:
    from orchestrator import sweeping
    from orchestrator.progress import JsonView, LineView, LiveView
    from orchestrator.study import changed_resources

    view = JsonView() if json else LiveView() if stderr.is_terminal else LineView()
    try:
        resources = changed_resources(study.resources, resource or [])
        finished = sweeping.run(study, text, folder, view, address, resources)
    except KeyboardInterrupt:
        stderr.print(f"stopped; nothing finished is lost. To go on: fedsweep resume {folder}")
        raise
    if json:
        event = "finished" if finished.complete else "stopped"
        emit_json({"event": event, "folder": folder, "failed": finished.failed, "tables": finished.tables})
    elif finished.complete:
        typer.echo(finished.page)
        stderr.print(f"tables are in {folder}/tables, the chosen values in {folder}/best.yaml")
    if finished.failed:
        stderr.print(f"{finished.failed} trials failed; fedsweep status {folder} says why")
    if not finished.complete:
        stderr.print(f"stopped before the end; nothing finished is lost. To go on: fedsweep resume {folder}")
        raise typer.Exit(130)
    if finished.failed:
        raise typer.Exit(1)


@app.command()
def plan(study: StudyName = "quickstart", json: Json = False) -> None:
    """Say what a study would run, in how many packs, and about how long it would take. Runs nothing."""
    from orchestrator import planning
    from orchestrator import study as studies

    loaded, _ = studies.load(study)
    found = planning.plan(loaded)
    if json:
        emit_json(found.as_dict())
    else:
        typer.echo(found.as_text())


@app.command()
def status(folder: Folder, json: Json = False) -> None:
    """Say how far the study of a result folder has come, also while it runs."""
    from orchestrator import status as standing

    found = standing.read(folder)
    if json:
        emit_json(found)
    else:
        typer.echo(standing.as_text(found))


@app.command()
def tables(folder: Folder) -> None:
    """Rebuild the tables of a result folder from its ledger."""
    from orchestrator.sweeping import rebuild_tables

    for path in rebuild_tables(folder):
        typer.echo(path)


@app.command()
def figures(folder: Folder) -> None:
    """Draw the figures of a result folder from its ledger: the score by round and by the number of clients."""
    from orchestrator.sweeping import draw_figures

    for path in draw_figures(folder):
        typer.echo(path)


@app.command()
def best(folder: Folder, json: Json = False) -> None:
    """Print the chosen configuration of every cell."""
    from orchestrator.sweeping import chosen_cells

    cells = chosen_cells(folder)
    if json:
        emit_json(cells)
        return
    for cell, chosen in cells.items():
        values = ", ".join(f"{name}={value}" for name, value in chosen["hyperparameters"].items())
        typer.echo(f"{cell}\n    {values}")
    typer.echo(f"\nto train one again: fedsweep train --from {folder}/best.yaml --cell NAME --seed 42")
