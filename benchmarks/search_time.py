"""Time spent in rounds by a study, searched by `grid` and by `surface`, in one process.

    python -m benchmarks.search_time REPORT.json [--study cifar10-resnet20] [--keep FOLDER]
    python -m benchmarks.search_time REPORT.json --repeat FOLDER [--rounds 2] [--device NAME]

The first form runs the study; `--keep` keeps the results. The second form takes kept results and trains a few rounds of
the same trials on this machine. A trial's rounds take equally long, so the time of each pack is multiplied by the
number of its rounds. A study with fewer rounds would be searched differently: with few rounds, more local steps look
better, and they cost more. Entries that the report has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrator.bench.clock import Clock
from orchestrator.execution import study_run
from orchestrator.execution.packing import Capacity, lanes_per_pack, make_packs
from orchestrator.execution.sweep import Sweep
from orchestrator.results.ledger import Ledger
from orchestrator.search.candidates import Outcome
from orchestrator.study import reading
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.study import Study
from trainables.errors import UserError
from trainables.federation.federation_size import FederationSize
from trainables.federation.hosts import Hosts
from trainables.federation.problem import ProblemData
from trainables.federation.server import Server
from trainables.lazy import torch

STRATEGIES = ("surface", "grid")


def searched_by(strategy: str, study: Study) -> Study:
    content = study.model_dump()
    content["search"]["strategies"] = [strategy]
    return Study.model_validate(content)


def device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def measure(study: Study, folder: Path, name: str) -> dict[str, Any]:
    """The time of all rounds. The results are in `folder` then. `name`: of the device."""
    clock = Clock()
    finished = study_run.run(study, reading.as_text(study), folder, clock, backend="local")
    with Ledger.read(folder) as ledger:
        ended = ledger.rows((key for keys in ledger.stages().values() for key in keys), whole=False)
    return {
        "study": study.name,
        "strategy": study.search.strategies[0],
        "complete": finished.complete,
        "rounds_s": round(clock.computing_s, 2),
        "trials": len(ended),
        "trial_rounds": sum(row.rounds for row in ended.values()),
        "rounds": None,
        "device": name,
    }


def repeat(results: Path, rounds: int, name: str) -> dict[str, Any]:
    """The time in rounds of all trials in a results folder, from that of `rounds` rounds of each. `name`: of the
    device."""
    study, _ = study_run.recorded_study(results)
    with Ledger.read(results) as ledger:
        outcomes = ledger.outcomes(study.objective)
    prepared = PreparedStudy.prepare(study)
    with tempfile.TemporaryDirectory() as folder, Ledger.write(Path(folder)) as copy:
        seconds, trials = _time_of_rounds(Sweep(prepared, copy), outcomes, rounds)
    return {
        "study": study.name,
        "strategy": study.search.strategies[0],
        "complete": True,
        "rounds_s": round(seconds, 2),
        "trials": trials,
        "trial_rounds": trials * rounds,
        "rounds": rounds,
        "device": name,
    }


def _time_of_rounds(sweep: Sweep, outcomes: dict[str, Outcome], rounds: int) -> tuple[float, int]:
    """Repeat a finished sweep: every trial that waits runs a few rounds, and then has its recorded outcome. The first
    round, in which rows are loaded, is not timed."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    lanes = lanes_per_pack(sweep.prepared.study.resources, kind)
    capacity = Capacity(FederationSize(1, 1.0, float(kind == "cuda")), 1, lanes)
    server, seconds, trials = Server(Hosts(1, kind), kind), 0.0, 0
    while not sweep.finished:
        waiting = dict(sweep.waiting)
        if missing := waiting.keys() - outcomes.keys():
            raise UserError(f"the search proposes {len(missing)} trials that the results do not have")
        for pack in make_packs(waiting.values(), capacity):
            server.open(pack, ProblemData.of(sweep.prepared.problems[pack[0].problem.key]))
            server.advance(1)
            began = time.perf_counter()
            server.advance(1 + rounds)
            seconds += (time.perf_counter() - began) * pack[0].last_round / rounds
        trials += len(waiting)
        sweep.ended({key: outcomes[key] for key in waiting})
    return seconds, trials


@contextmanager
def _results_folder(keep: Path | None, strategy: str) -> Iterator[Path]:
    if keep is not None:
        if (keep / strategy).exists():
            raise UserError(f"--keep: {keep / strategy} exists already; a resumed run would take less time")
        yield keep / strategy
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--study", default="cifar10-resnet20")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--keep", type=Path, help="folder for the results of each strategy")
    parser.add_argument("--repeat", type=Path, help="folder of kept results")
    parser.add_argument("--rounds", type=int, default=2, help="timed rounds of every trial, with --repeat")
    parser.add_argument("--device", default=device(), help="name of this machine in the report")
    options = parser.parse_args()
    known = json.loads(options.report.read_text(encoding="utf-8")) if options.report.exists() else []
    rounds = options.rounds if options.repeat else None
    for strategy in options.strategies:
        if options.repeat:
            study, _ = study_run.recorded_study(options.repeat / strategy)
        else:
            study = searched_by(strategy, reading.load(options.study)[0])
        wanted = (study.name, strategy, options.device, rounds)
        if any((e["study"], e["strategy"], e["device"], e["rounds"]) == wanted and e["complete"] for e in known):
            continue
        if options.repeat:
            known.append(repeat(options.repeat / strategy, options.rounds, options.device))
        else:
            with _results_folder(options.keep, strategy) as folder:
                known.append(measure(study, folder, options.device))
        print(json.dumps(known[-1]), flush=True)
        options.report.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
