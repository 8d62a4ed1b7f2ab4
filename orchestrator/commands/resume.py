"""`fedsweep resume`."""

from __future__ import annotations

from orchestrator.commands.options import Folder, RunOptions, run_options


@run_options
def resume(folder: Folder, *, options: RunOptions) -> None:
    """Continue the study of a results folder, even after a crash."""
    from orchestrator.commands import sweep
    from orchestrator.execution.study_run import recorded_study

    loaded, text = recorded_study(folder)
    sweep.run_and_print(loaded, text, folder, options)
