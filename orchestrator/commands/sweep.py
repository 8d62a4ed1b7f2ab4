"""Shared by `run`, `resume` and the commands that read a results folder or write files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from orchestrator.commands.options import RunOptions, seconds_of, shard_of
from orchestrator.console import echo, emit_json, stderr
from trainables import plugins
from trainables.errors import UserError

if TYPE_CHECKING:
    from orchestrator.study.study import Study


def run_and_print(study: Study, text: str, folder: str, options: RunOptions) -> None:
    from orchestrator.execution import study_run
    from orchestrator.execution.progress import JsonView, LineView, LiveView
    from orchestrator.study.reading import changed_resources

    view = JsonView() if options.json else LiveView() if stderr.is_terminal else LineView()
    try:
        finished = study_run.run(
            study,
            text,
            folder,
            view,
            backend=options.backend,
            address=options.address,
            resources=changed_resources(study.resources, options.resource or []),
            stop_after_s=seconds_of(options.stop_after),
            shard=shard_of(options.shard),
        )
    except KeyboardInterrupt:
        stderr.print(f"stopped; finished trials are saved. To continue: {plugins.command('resume', folder)}")
        raise
    if options.json:
        event = "finished" if finished.complete else "stopped"
        lists = {"tables": finished.tables, "notes": finished.doubts}
        emit_json({"event": event, "folder": folder, "failed": finished.failed, **lists})
    elif finished.complete:
        echo(finished.page)
        for sentence in finished.doubts:
            stderr.print(f"note: {sentence}")
        stderr.print(f"tables: {folder}/tables; winning configurations: {folder}/best.yaml")
        stderr.print(f"for an HTML report: {plugins.command('report', folder)}")
    if finished.failed:
        trials = "trials" if finished.failed > 1 else "trial"
        stderr.print(f"{finished.failed} {trials} failed; for the reasons: {plugins.command('status', folder)}")
    if not finished.complete:
        command = plugins.command("resume", folder)
        stderr.print(f"stopped before the end; finished trials are saved. To continue: {command}")
        raise typer.Exit(130)
    if finished.failed:
        raise typer.Exit(1)


@contextlib.contextmanager
def output_errors(option: str) -> Iterator[None]:
    """Turn an `OSError` into a one-sentence `UserError`. `option`: the option with which to choose another place."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be written: {error.strerror}; choose another place with {option}"
        ) from error


def warn_if_unfinished(folder: str) -> None:
    """Print a note if the study is unfinished, because its results are then preliminary."""
    from orchestrator.results import status

    progress = status.read(folder)
    if not progress["finished"]:
        ended, total = progress["cells_ended"], progress["cells_total"]
        command = plugins.command("status", folder)
        stderr.print(f"the study is not finished: {ended} of {total} cells have ended; see {command}")
