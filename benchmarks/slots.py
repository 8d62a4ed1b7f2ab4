"""Utilisation of the slots of a cluster: a whole sweep with Ray Tune and packs that only wait.

    python -m benchmarks.slots                 the whole table of docs/scaling.md, 15 minutes
    python -m benchmarks.slots 16 2            16 slots, packs of 2 seconds
    python -m benchmarks.slots trials 100000   the driver's cost per trial, with trials that take no time

Every slot is a process; the local Ray is started with one (virtual) CPU per slot. `python -m benchmarks.scaling table`
prints the measurements.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.scaling import machine_and_load, save
from benchmarks.waiting import WaitingFederation
from orchestrator.execution.backends import ray as ray_backend
from orchestrator.execution.backends.base import SweepRun
from orchestrator.execution.cluster.connect import connected
from orchestrator.execution.packing import Capacity
from orchestrator.execution.progress import View
from orchestrator.execution.sweep import Sweep
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import results_location
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.study import Study
from trainables.federation.federation_size import FederationSize

CELLS = 4
WAVES = {0.5: 24, 2.0: 12, 30.0: 3}  # seconds per pack: packs per slot and stage


def study(slots: int, waves: int) -> Study:
    """`waves` packs per slot in the coarse and the fine stage, and one per slot in the confirm stage."""
    rates = [0.001 * (k + 1) for k in range(slots * waves // CELLS)]
    return _study(
        {
            "name": "dp-fedgd",
            "coarse": {"learning_rate": rates},
            "fine": {"learning_rate": [r + 0.0005 for r in rates]},
        },
        epsilons=[float(2**k) for k in range(CELLS)],
        seeds={"search": 42, "contest": [], "confirm": [100 + k for k in range(max(1, slots // CELLS))]},
    )


def _study(method: dict[str, Any], **settings: Any) -> Study:
    return Study.model_validate(
        {
            "name": "slots",
            "defaults": "paper",
            "data": [{"source": "synthetic-frozen:400,100,6,3", "label": "none"}],
            "partitions": ["iid"],
            "clients": 4,
            "methods": [method],
            "rounds": {"coarse": 10, "fine": 10, "confirm": 10},
            "search": {"refine": "table"},
            **settings,
        }
    )


@contextmanager
def waiting_sweep(measured_study: Study, slots: int, seconds: float, lanes: int) -> Iterator[tuple[Sweep, Path, float]]:
    """A finished sweep of packs that only wait, its folder, and the CPU time of planning it."""
    with tempfile.TemporaryDirectory(prefix="fedsweep-slots-") as name:
        folder = Path(name)
        (folder / "seen").mkdir()
        processor = time.process_time()
        with Ledger.write(folder / "results") as ledger:
            sweep = Sweep(PreparedStudy.prepare(measured_study), ledger)
            planned = time.process_time() - processor
            run = SweepRun(sweep, measured_study.resources, results_location(folder / "results"), View())
            start = functools.partial(WaitingFederation, seconds, slots, str(folder / "seen"))
            ray_backend.run_slots(run, Capacity(FederationSize(), slots, lanes_per_pack=lanes), start=start)
            assert sweep.finished
        yield sweep, folder, planned


def measure(slots: int, seconds: float) -> dict[str, float]:
    measured_study = study(slots, WAVES[seconds])
    with connected(cpus=slots):
        began, processor = time.time(), time.process_time()
        with waiting_sweep(measured_study, slots, seconds, lanes=1) as (_, folder, _):
            ended, used, seen = time.time(), time.process_time() - processor, folder / "seen"
            ran = [[json.loads(line) for line in file.read_text().splitlines()] for file in seen.glob("packs-*")]
            assert len(list(seen.glob("up-*"))) == slots, "every federation was started once"
    packs = [pack for process in ran for pack in process]
    first, last = min(pack[0] for pack in packs), max(pack[1] for pack in packs)
    busy = sum(end - start for start, end in packs) / (slots * (last - first))
    return {
        "slots": slots,
        "seconds": seconds,
        "packs": len(packs),
        "busy": busy,
        "processes": len(ran),
        "driver": used / (ended - began),
        "start_s": first - began,
    }


def cost_of_trials(trials: int) -> dict[str, float]:
    """The driver's work per trial: plan, check, send, receive, account, record. Half of the trials are coarse, half
    fine. Every configuration has three seeds. Two slots run packs of 1,024 lanes."""
    rates, rhos, betas = ([low + step * k for k in range(many)] for low, step, many in AXES)
    axes = {"learning_rate": rates[: trials // 600], "rho": rhos, "beta": betas}
    measured_study = _study(
        {"name": "dp-fedsofim", "coarse": axes, "fine": {**axes, "rho": [rho + 20 for rho in rhos]}},
        epsilons=[8.0],
        seeds={"search": [42, 43, 44], "contest": [], "confirm": [7]},
    )
    with connected(cpus=2):
        memory, began, processor = _resident(), time.time(), time.process_time()
        with waiting_sweep(measured_study, 2, 0.0, lanes=1024) as (_, folder, planned):
            used, took, grown = time.process_time() - processor, time.time() - began, _resident() - memory
            size = (folder / "results" / "ledger.sqlite").stat().st_size
    return {
        "trials": trials,
        "driver_ms": 1000 * used / trials,
        "driver_ready_ms": 1000 * planned / trials,
        "driver_bytes": grown / trials,
        "ledger_bytes": size / trials,
        "seconds": took,
    }


AXES = ((0.001, 0.001, 1000), (1.0, 1.0, 10), (0.0, 0.05, 10))


def _resident() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def main() -> None:
    if sys.argv[1:2] == ["trials"]:
        machine, found = machine_and_load(), cost_of_trials(int(sys.argv[2]))
        print(found)
        save("driver", "with_tune", found, machine)
        return
    chosen = [(int(sys.argv[1]), float(sys.argv[2]))] if len(sys.argv) == 3 else None
    for slots, seconds in chosen or [(n, s) for n in (4, 16, 64) for s in sorted(WAVES)]:
        machine, found = machine_and_load(), measure(slots, seconds)
        print(found, flush=True)
        save("slots", f"{slots} slots, packs of {seconds:g} s", found, machine)


if __name__ == "__main__":
    main()
