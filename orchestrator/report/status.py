"""How a result folder stands, read from its ledger alone."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from pathlib import Path
from typing import Any

from orchestrator.results.ledger import Ledger
from orchestrator.results.places import place
from orchestrator.search.cell_search import SEARCH_STAGES
from orchestrator.search.optuna_search import search_budget
from orchestrator.study.settings import Study
from trainables.errors import UserError
from trainables.objective import OBJECTIVES

STAGES = ("coarse", "fine", "optuna", "confirm")


def read(results: Path | str) -> dict[str, Any]:
    where = place(results)
    with where.to_read() as folder, Ledger.read(folder) as ledger:
        recorded, stages = ledger.study(), ledger.stages()
        if recorded is None:
            raise UserError(f"result folder {results} holds no study yet")
        study = Study.model_validate_json(recorded[0])
        outcomes, failures = ledger.outcomes(study.objective), ledger.failures()
        failed = [key for key, (state, _, _) in outcomes.items() if state == "failed"]
        reasons = {key: row.reason for key, row in ledger.rows(failed).items()}
        running = _holder(folder) or where.holder()
    objective, cells = study.judged_by, []
    for cell, way in dict.fromkeys((cell, way) for cell, way, _ in stages):
        opened = {stage: stages[cell, way, stage] for stage in STAGES if (cell, way, stage) in stages}
        searched = [key for stage in SEARCH_STAGES[way] for key in opened.get(stage, [])]
        scores = [score for key in searched if key in outcomes and (score := outcomes[key][1]) is not None]
        cells.append(
            {
                "cell": cell,
                "way": way,
                "stages": {
                    stage: {"done": sum(key in outcomes for key in keys), "total": len(keys)}
                    for stage, keys in opened.items()
                },
                f"best_validation_{objective.metric}": min(scores, key=objective.cost, default=None),
            }
        )
    expected = len(study.data) * len(study.partitions) * len(study.methods) * len(study.epsilons)
    ended = sum(_has_ended(cell, outcomes, stages, study) for cell in cells)
    states = Counter(state for state, _, _ in outcomes.values())
    return {
        "study": study.name,
        "objective": study.objective,
        "finished": ended == expected * len(study.search.ways),
        "running": running,
        "cells_ended": ended,
        "cells_total": expected * len(study.search.ways),
        "trials": dict(sorted(states.items())),
        "cells": cells,
        "failed": reasons,
        "retries": [{"trials": count, "first": key, "reason": reason} for count, key, reason in failures],
    }


def _has_ended(cell: dict[str, Any], outcomes: dict, stages: dict, study: Study) -> bool:
    counts = cell["stages"]
    if any(count["done"] < count["total"] for count in counts.values()):
        return False
    if "confirm" in counts:
        return True
    keys = [key for stage in SEARCH_STAGES[cell["way"]] for key in stages.get((cell["cell"], cell["way"], stage), [])]
    if not keys or any(outcomes[key][0] == "done" for key in keys):
        return False
    if cell["way"] == "grid":
        return True
    method = next(
        method
        for method in study.methods
        for epsilon in study.epsilons
        if cell["cell"].endswith(f" / {method.shown} / eps {epsilon:g}")
    )
    return len(keys) >= search_budget(method.space())


def _holder(folder: Path) -> str | None:
    """Who runs the study right now, if anyone."""
    try:
        descriptor = os.open(folder / "ledger.lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return os.read(descriptor, 200).decode(errors="replace").strip()
    finally:
        os.close(descriptor)
    return None


def as_text(found: dict[str, Any]) -> str:
    objective = OBJECTIVES[found["objective"]]
    state = "finished" if found["finished"] else f"running ({found['running']})" if found["running"] else "not finished"
    lines = [f"study {found['study']}: {state}, {found['cells_ended']} of {found['cells_total']} cells ended"]
    lines.append("trials: " + (", ".join(f"{count} {name}" for name, count in found["trials"].items()) or "none"))
    shown = [stage for stage in STAGES if any(stage in cell["stages"] for cell in found["cells"])]
    width = max((len(_name(cell)) for cell in found["cells"]), default=4)
    lines.append(
        f"{'cell':<{width}}  " + "".join(f"{stage:>10}" for stage in shown) + f"  best validation {objective.short}"
    )
    for cell in found["cells"]:
        counts = [cell["stages"].get(stage) for stage in shown]
        best = cell[f"best_validation_{objective.metric}"]
        lines.append(
            f"{_name(cell):<{width}}  "
            + "".join(f"{_count(c):>10}" for c in counts)
            + (f"  {objective.shown(best)}" if best is not None else "  ·")
        )
    lines += [f"retried: a pack of {retry['trials']} trials: {retry['reason']}" for retry in found["retries"]]
    lines += [f"failed: trial {key}: {reason}" for key, reason in found["failed"].items()]
    return "\n".join(lines)


def _name(cell: dict[str, Any]) -> str:
    return cell["cell"] if cell["way"] == "grid" else f"{cell['cell']} ({cell['way']})"


def _count(count: dict[str, int] | None) -> str:
    return f"{count['done']}/{count['total']}" if count else "·"
