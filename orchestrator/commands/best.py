"""`fedsweep best`."""

from __future__ import annotations

import statistics
from typing import Any

from orchestrator.commands.options import Folder, Json
from orchestrator.commands.sweep import warn_if_unfinished
from orchestrator.console import show
from orchestrator.search.objective import Objective, objective_of
from trainables import plugins
from trainables.metrics import METRICS


def best(folder: Folder, json: Json = False) -> None:
    """Print the winning configuration of every cell."""
    from orchestrator.execution.study_run import chosen_cells

    cells = chosen_cells(folder)
    warn_if_unfinished(folder)
    lines = []
    for cell, winner in cells.items():
        chosen = {**winner["hyperparameters"], "clip": winner["clip"], "rounds": winner["rounds"]}
        values = ", ".join(f"{name}={value}" for name, value in chosen.items())
        lines.append(f"{cell}\n    {values}\n    {_scores(winner)}")
    if cells:
        command = plugins.command("train", "--from", f"{folder}/best.yaml", "--cell", "NAME", "--seed", "42")
        lines.append(f"\nto retrain one: {command}")
    show(cells, json, lines)


def _scores(winner: dict[str, Any]) -> str:
    """Validation scores, then test scores."""
    scores = []
    for split in ("validation", "test"):
        for name, value in winner.items():
            if name.startswith(f"{split}_") and name.removeprefix(f"{split}_") in METRICS:
                objective = objective_of(name.removeprefix(f"{split}_"))
                values = list(value.values()) if isinstance(value, dict) else [value]
                scores.append(f"{split} {objective.short} {_mean([v for v in values if v is not None], objective)}")
    return ", ".join(scores)


def _mean(values: list[float], objective: Objective) -> str:
    if not values:
        return "unknown"
    mean = objective.format(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ± {objective.format(statistics.stdev(values))} ({len(values)} seeds)"
