"""Predictions of `fedsweep frontier` against runs with new seeds.

python -m benchmarks.frontier REPORT.json --data FILE ... [--device cuda] searches with `surface` at some budgets, and
trains the predicted configurations at these budgets and between them. The bar: predicted and confirmed validation
accuracy differ by at most 0.5 points or two standard errors of the confirmed mean."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.execution import study_run
from orchestrator.execution.frontier import confirmed, read_surfaces
from orchestrator.execution.progress import View
from orchestrator.study import reading
from orchestrator.study.study import Study

SEARCHED = (0.5, 1, 2, 4, 8)
BETWEEN = (0.7, 1.4, 2.8, 5.6)
METHODS = ("dp-fedgd", "dp-fedsofim", "dp-fedadam")
POINTS, ERRORS = 0.5, 2.0
"""The bar: allowed difference in points, or in standard errors if that is more."""


def measure(data: str, method: str, seeds: int, device: str) -> Iterator[dict[str, Any]]:
    study = Study.model_validate(
        {
            "name": "frontier",
            "data": [data],
            "partitions": ["dirichlet:0.5"],
            "clients": 20,
            "methods": [method],
            "defaults": "paper",
            "epsilons": list(SEARCHED),
            "search": {"strategies": ["surface"]},
            "resources": {"gpus_per_host": 1 if device == "cuda" else 0},
            "seeds": {"search": [1, 2, 3], "contest": [11, 12, 13, 14, 15], "confirm": [42]},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        study_run.run(study, reading.as_text(study), Path(folder), View(), backend="local")
        _, (surface,) = read_surfaces(folder)
        for epsilon in sorted({*SEARCHED, *BETWEEN}):
            point = surface.at(float(epsilon))
            found = confirmed(surface, point, seeds, None, None, device)
            apart = abs(point.score - found.mean)
            yield {
                "data": Path(data).stem,
                "method": method,
                "epsilon": epsilon,
                "searched": point.searched,
                "predicted": round(point.score, 3),
                "deviation": round(point.deviation, 3),
                "confirmed": round(found.mean, 3),
                "error": round(found.error, 3),
                "seeds": found.seeds,
                "holds": bool(apart <= max(POINTS, ERRORS * found.error)),
                "configuration": {name: point.configuration[name] for name in surface.lattice.axes},
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    known = json.loads(options.report.read_text(encoding="utf-8")) if options.report.exists() else []
    for data in options.data:
        for method in options.methods:
            if any((entry["data"], entry["method"]) == (Path(data).stem, method) for entry in known):
                continue
            start = time.time()
            known += list(measure(data, method, options.seeds, options.device))
            options.report.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            print(f"{data}, {method}: {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
