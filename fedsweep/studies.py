"""Run and plan studies from Python.

Stability: public. `run_study` and `plan_study` are stable; the fields of the returned plan may grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsweep.results import Results
from orchestrator.execution import planning, study_run
from orchestrator.execution.progress import View
from orchestrator.results.locations import default_folder
from orchestrator.study import reading
from orchestrator.study.settings.resources import ResourceSettings
from orchestrator.study.study import Study

StudyLike = str | Path | Mapping[str, Any] | Study


class Quiet(View):
    """Shows no progress."""

    def say(self, sentence: str) -> None:
        pass


def run_study(
    study: StudyLike,
    results: str | Path | None = None,
    *,
    backend: str = "ray",
    address: str | None = None,
    resources: Mapping[str, Any] | None = None,
    view: View | None = None,
) -> Results:
    """Run a study and return its results. Finished trials are not repeated.

    `study`: a file, the name of a packaged study, a dict with the keys of a study file, or a `Study`.
    `results`: results folder or URL; default: results/NAME.
    `backend`: "ray", or "local" to run in this process; the results are the same.
    `address`: address of a Ray cluster; default: a local Ray that runs until the call returns.
    `resources`: overrides of the study's resource settings for this run; they change no result, apart from the last
    bits between CPU and GPU.
    `view`: receives progress; default: none (`LineView` of orchestrator.execution.progress prints lines).
    """
    loaded, text = read_study(study)
    folder = str(results or default_folder(loaded.name))
    chosen = ResourceSettings.model_validate({**loaded.resources.model_dump(), **(resources or {})})
    study_run.run(loaded, text, folder, view or Quiet(), backend=backend, address=address, resources=chosen)
    return Results(folder)


def plan_study(study: StudyLike) -> planning.Plan:
    """Plan a study without running it: trials and packs by stage, estimated time and memory."""
    return planning.plan(read_study(study)[0])


def read_study(study: StudyLike) -> tuple[Study, str]:
    """The study and its YAML text, from any of the accepted forms."""
    if isinstance(study, Study):
        return study, reading.as_text(study)
    if isinstance(study, Mapping):
        checked = reading.from_mapping(study, "the study")
        return checked, reading.as_text(checked)
    return reading.load(str(study))
