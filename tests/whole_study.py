"""A study from its text to its tables, in this process."""

from pathlib import Path

from orchestrator.execution import study_run
from orchestrator.execution.progress import View
from orchestrator.study import reading


def run(text: str, folder: Path, view: View | None = None) -> study_run.Finished:
    study = reading.parse(text, "study.yaml", Path.cwd())
    return study_run.run(study, text, folder, view or View(), backend="local")
