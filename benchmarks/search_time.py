"""Time spent in rounds by a study, searched by `grid` and by `surface`, in one process.

python -m benchmarks.search_time REPORT.json [--study cifar10-resnet20] [--rounds N]

The time in rounds is proportional to the number of rounds, so fewer rounds give the same ratio on a slow machine.
Strategies that the report has are not run again."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

from orchestrator.bench.clock import Clock
from orchestrator.execution import study_run
from orchestrator.results.ledger import Ledger
from orchestrator.study import reading
from orchestrator.study.study import Study
from trainables.lazy import torch


def measure(name: str, strategy: str, rounds: int | None) -> dict[str, Any]:
    study, _ = reading.load(name)
    content = study.model_dump()
    content["search"]["strategies"] = [strategy]
    if rounds:
        content["rounds"] = dict.fromkeys(content["rounds"], rounds)
    study = Study.model_validate(content)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        finished = study_run.run(study, reading.as_text(study), Path(folder), clock, backend="local")
        with Ledger.read(Path(folder)) as ledger:
            ended = ledger.rows((key for keys in ledger.stages().values() for key in keys), whole=False)
    clock.mark("end")
    return {
        "study": name,
        "strategy": strategy,
        "complete": finished.complete,
        "rounds_s": round(clock.computing_s, 2),
        "total_s": round(clock.marks["end"], 2),
        "trials": len(ended),
        "trial_rounds": sum(row.rounds for row in ended.values()),
        "rounds": rounds,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--study", default="cifar10-resnet20")
    parser.add_argument("--rounds", type=int, help="rounds of every trial; default: the study's")
    parser.add_argument("--strategies", nargs="+", default=["surface", "grid"])
    options = parser.parse_args()
    known = json.loads(options.report.read_text(encoding="utf-8")) if options.report.exists() else []
    for strategy in options.strategies:
        if not any(
            (e["study"], e["strategy"], e["rounds"]) == (options.study, strategy, options.rounds) for e in known
        ):
            known.append(measure(options.study, strategy, options.rounds))
            print(json.dumps(known[-1]), flush=True)
            options.report.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
