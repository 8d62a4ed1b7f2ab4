"""`fedsweep run`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.commands.options import RunOptions, StudyName, run_options


@run_options
def run(
    study: StudyName = "quickstart",
    results: Annotated[
        str | None, typer.Option(metavar="DIR", help="Results folder or URL.  [default: results/NAME]")
    ] = None,
    *,
    options: RunOptions,
) -> None:
    """Run a study: search, confirm winners, write tables. Finished trials are not repeated."""
    from orchestrator.commands import sweep
    from orchestrator.results.locations import default_folder
    from orchestrator.study import reading

    loaded, text = reading.load(study)
    folder = results or str(default_folder(loaded.name))
    with reading.errors_name_lines(text, study):
        sweep.run_and_print(loaded, text, folder, options)
