"""Studies from Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsweep.results import Results
from orchestrator.execution import planning, study_run
from orchestrator.execution.progress import View
from orchestrator.study import reading
from orchestrator.study.settings import ResourceSettings, Study

StudyLike = str | Path | Mapping[str, Any] | Study


class Quiet(View):
    """Says nothing."""

    def say(self, sentence: str) -> None:
        pass


def run_study(
    study: StudyLike,
    results: str | Path | None = None,
    *,
    address: str | None = None,
    resources: Mapping[str, Any] | None = None,
    view: View | None = None,
) -> Results:
    """Run what is missing of a study and return its results; run again, it does nothing but return them.

    `study`: a file, the name of a packaged study, a dict with the keys of a study file, or a `Study`.
    `results`: the folder or URL to keep them in; default: results/NAME.
    `address`: of a Ray cluster to run on; default: a local Ray, started here and ended with the call.
    `resources`: instead of the study's own, for this run; never changes a result.
    `view`: who is told of progress; default: nobody (`LineView` of orchestrator.execution.progress prints lines).
    """
    loaded, text = read_study(study)
    folder = str(results or Path("results") / loaded.name)
    chosen = ResourceSettings.model_validate({**loaded.resources.model_dump(), **(resources or {})})
    study_run.run(loaded, text, folder, view or Quiet(), address, chosen)
    return Results(folder)


def plan_study(study: StudyLike) -> planning.Plan:
    """What a study would run: trials and packs by stage, about how long and how much memory. Runs nothing."""
    return planning.plan(read_study(study)[0])


def read_study(study: StudyLike) -> tuple[Study, str]:
    """A study however it is given, and its text."""
    if isinstance(study, Study):
        return study, reading.as_text(study)
    if isinstance(study, Mapping):
        checked = reading.from_mapping(study, "the study")
        return checked, reading.as_text(checked)
    return reading.load(str(study))
