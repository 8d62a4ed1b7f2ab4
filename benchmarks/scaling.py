"""The cost of very many trials at the driver and of every command that reads them, with trials that compute nothing.

    python -m benchmarks.scaling 10000 100000             measure these numbers of trials
    python -m benchmarks.scaling 1000000 --folder DIR     keep the results folder there, and use one that exists
    python -m benchmarks.scaling view 10000 100000        the live view of studies of this size
    python -m benchmarks.scaling url 10000 100000         what is uploaded of a ledger at a URL
    python -m benchmarks.scaling keys                     the index of the trials' keys in SQLite
    python -m benchmarks.scaling table                    the tables of docs/scaling.md, from the measurements

A cell has 1,000 trials: coarse, fine, contest and confirm. The study, search, scheduler and ledger are the real ones;
the federation answers at once with made-up results. Every command runs in its own process. CPU time is user and system
time; peak memory is that of the process. The measurements are in benchmarks/reports/scaling.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator.execution.backends.base import SweepRun, scheduling
from orchestrator.execution.packing import Capacity
from orchestrator.execution.progress import LiveView, View
from orchestrator.execution.scheduler import Scheduler
from orchestrator.execution.study_run import _record_study
from orchestrator.execution.sweep import Sweep
from orchestrator.results import counts
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import results_location
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.study import Study
from trainables.federation.federation_size import FederationSize
from trainables.federation.lane_result import METRICS, LaneResult
from trainables.federation.messages import Report
from trainables.federation.trial_spec import TrialSpec

REPORT = Path(__file__).parent / "reports" / "scaling.json"
TRIALS_PER_CELL = 1000
SLOTS, LANES = 16, 2048
UPDATES = 5  # measured updates of the live view
KEYS, KNOWN_KEYS = 100_000, (0, 1_000_000, 2_000_000)
SEEDS = {"search": [42, 43, 44], "contest": [50, 51, 52, 53, 54, 55, 56], "confirm": [100, 101, 102, 103, 104]}
AXES: dict[str, dict[str, list[float]]] = {
    "dp-fedsofim": {"rho": [0.1, 1.0, 5.0, 10.0], "beta": [0.8, 0.9, 0.95, 0.99]},
    "dp-fedadam": {"beta2": [0.9], "beta1": [0.0, 0.8, 0.9, 0.95], "tau": [1e-5, 1e-3, 0.01, 0.1]},
    "dp-fedyogi": {"beta2": [0.9], "beta1": [0.0, 0.5, 0.9, 0.95], "tau": [1e-5, 1e-3, 0.01, 0.1]},
    "dp-fedgd": {"clip": [0.25 * (k + 1) for k in range(16)]},
    "dp-scaffold": {"client_learning_rate": [0.01, 0.05, 0.1, 0.5], "local_steps": [1, 3, 5, 7]},
}
RATES = {"dp-scaffold": "server_learning_rate"}
BARS = {
    "driver_ms": ("driver, CPU time per trial", "0.25 ms"),
    "driver_wall_ms": ("driver, elapsed time per trial", ""),
    "driver_bytes": ("driver, memory per trial", "500 B"),
    "ledger_bytes": ("ledger per trial", ""),
    "view_ms": ("driver, an update of the live view", ""),
    "uploaded": ("uploads of a ledger at a URL", ""),
    "status": ("`status`", "2 s"),
    "best": ("`best`", "5 s"),
    "tables": ("`tables`", "60 s, 1 GB"),
    "tables again": ("`tables`, one cell changed", ""),
    "report": ("`report`", "60 s"),
    "check": ("`check`", ""),
    "merge": ("`merge` of two halves", "180 s"),
}
SECTIONS = {"view_ms": "view", "uploaded": "url"}  # of the report; the others are in "trials"
DESK_COLUMNS = {
    "messages_per_s": ("messages per second", "{:.0f}"),
    "message_cpu_ms": ("desk, CPU time per message", "{:.2f} ms"),
    "desk_share_of_core": ("desk, share of a core", "{:.0%}"),
    "driver_share_of_core": ("driver, share of a core", "{:.0%}"),
    "heartbeat": ("a heartbeat is answered after, median (99%)", "{:.0f} ms ({:.0f} ms)"),
    "wait": ("from the end of a pack to the next, median (99%)", "{:.0f} ms ({:.0f} ms)"),
}


def study(trials: int) -> Study:
    """Five methods; the number of trials decides the number of budgets and partitions."""
    cells = trials // TRIALS_PER_CELL
    budgets = max(1, min(10, cells // 10)) if cells >= 20 else max(1, cells // 5)
    partitions = max(1, cells // (5 * budgets))
    rates = [0.001 * 2**k for k in range(10)]
    return Study.model_validate(
        {
            "name": "scaling",
            "data": [{"source": "synthetic-frozen:400,1000,6,3", "label": "none"}],
            "partitions": ["iid", *(f"dirichlet:{0.1 * (k + 1):.1f}" for k in range(partitions - 1))],
            "clients": 4,
            "methods": [
                {
                    "name": name,
                    "coarse": {RATES.get(name, "learning_rate"): rates, **axes},
                    "fine": {RATES.get(name, "learning_rate"): [1.5 * rate for rate in rates], **axes},
                }
                for name, axes in AXES.items()
            ],
            "epsilons": [float(2 ** (k - 3)) for k in range(budgets)],
            "rounds": {"coarse": 20, "fine": 20, "confirm": 50},
            "evaluate_every": 10,
            "seeds": SEEDS,
            "search": {"refine": "table", "finalists": 5},
        }
    )


def made_up(trial: TrialSpec) -> LaneResult:
    """A result that depends on the trial's key alone; one trial of 256 diverges."""
    number, last = int(trial.key[:8], 16), trial.last_round
    rounds = range(trial.evaluate_every, last + 1, trial.evaluate_every)
    values = {t: 20 + number % 4093 / 64 + t / 10 for t in rounds}
    metrics = {name: {t: value / (place + 1) for t, value in values.items()} for place, name in enumerate(METRICS)}
    confirm = trial.problem.evaluate_on == "test"
    correct = (number.to_bytes(4, "big") * 32)[:125] if confirm else b""
    state = "diverged" if trial.key[-2:] == "00" else "done"
    return LaneResult(trial.key, state, last, metrics, 0.25, correct)


def run(folder: Path | str, trials: int, count_uploads: Callable[[Any], None] | None = None) -> dict[str, float]:
    """A whole sweep, as `fedsweep run` does it, without its tables. `count_uploads` is called with the location."""
    planned = study(trials)
    memory, began, processor = _status_field("VmRSS"), time.perf_counter(), time.process_time()
    location = results_location(folder)
    if count_uploads is not None:
        count_uploads(location)
    with location.open_for_writing(), Ledger.write(location.folder, keeps_log=location.uploads_log) as ledger:
        ledger.check_rows(location)
        prepared = PreparedStudy.prepare(planned)
        with ledger.transaction():
            _record_study(ledger, prepared, planned.model_dump_json())
            sweep = Sweep(prepared, ledger)
        ready = time.process_time() - processor
        ledger.begin_session({"device": "cpu", "kernel": "none", "machine": platform.machine()})
        swept = SweepRun(sweep, planned.resources, location, View())
        with scheduling(swept, Capacity(FederationSize(), SLOTS, LANES)) as scheduler:
            others = _answer(scheduler)
        assert sweep.finished
        count = len(sweep.known)
        used, wall = time.process_time() - processor - others, time.perf_counter() - began
        peak = _status_field("VmHWM") - memory
    size = (Path(str(folder).removeprefix("file://")) / "ledger.sqlite").stat().st_size
    return {
        "trials": count,
        "cells": len(sweep.searches),
        "driver_ms": 1000 * used / count,
        "driver_ready_ms": 1000 * ready / count,
        "driver_wall_ms": 1000 * wall / count,
        "driver_bytes": peak / count,
        "ledger_bytes": size / count,
    }


def _answer(scheduler: Scheduler) -> float:
    """Every slot takes packs and ends them, until the sweep is over. Returns the CPU time of the slots."""
    used = 0.0
    while not scheduler.over:
        orders = scheduler.next_orders()
        slots = [f"slot {number}" for number in range(len(orders))]
        for slot, order in zip(slots, orders, strict=True):
            scheduler.receive([Report(slot, order.number, "started", nodes=("node",))])
        for slot, order in zip(slots, orders, strict=True):
            began = time.process_time()
            lanes, last = list(map(made_up, order.trials)), order.trials[0].last_round
            used += time.process_time() - began
            scheduler.receive([Report(slot, order.number, "ended", last, lanes=lanes)])
    return used


def live_view(trials: int) -> dict[str, float]:
    """The CPU time of an update of the live view, at the start of a sweep, on a terminal of 120 x 40 characters."""
    with (
        tempfile.TemporaryDirectory(prefix="fedsweep-scaling-") as folder,
        Ledger.write(Path(folder)) as ledger,
        open(os.devnull, "w") as nowhere,
    ):
        with ledger.transaction():
            sweep = Sweep(PreparedStudy.prepare(study(trials)), ledger)
        console = Console(file=nowhere, force_terminal=True, width=120, height=40)
        location = results_location(Path(folder))
        swept = SweepRun(sweep, sweep.prepared.study.resources, location, View())
        times = []
        with scheduling(swept, Capacity(FederationSize(), SLOTS, LANES)) as scheduler, LiveView(console) as view:
            for _ in range(UPDATES):
                began = time.process_time()
                view.show(scheduler)
                times.append(time.process_time() - began)
    return {"view_ms": 1000 * statistics.median(times)}


class CountedFiles:
    """A file system that counts what is written to it."""

    def __init__(self, files: Any) -> None:
        self._files = files
        self.increments = self.increment_bytes = self.files = self.file_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def pipe_file(self, path: str, value: bytes) -> None:
        self.increments += 1
        self.increment_bytes += len(value)
        self._files.pipe_file(path, value)

    def put_file(self, local: str, path: str) -> None:
        self.files += "ledger.sqlite" in path
        self.file_bytes += Path(local).stat().st_size
        self._files.put_file(local, path)


def uploads(trials: int) -> dict[str, float]:
    """What is uploaded during a study with results at a URL, apart from checkpoints."""

    def count(location: Any) -> None:
        location._files = location._ledger._files = CountedFiles(location._files)
        counted.append(location._files)

    counted: list[CountedFiles] = []
    with tempfile.TemporaryDirectory(prefix="fedsweep-scaling-") as folder:
        found = run(f"file://{folder}/results", trials, count)
    (files,) = counted
    return {
        "uploaded": (files.increment_bytes + files.file_bytes) / (found["trials"] * found["ledger_bytes"]),
        "increments": files.increments,
        "increment_bytes": files.increment_bytes,
        "whole_uploads": files.files,
        "whole_bytes": files.file_bytes,
        "driver_ms": found["driver_ms"],
    }


def key_insertions() -> dict[str, float]:
    """The CPU time, in microseconds per key, of giving numbers to new trials, by the number of known trials."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="fedsweep-scaling-") as folder, Ledger.write(Path(folder)) as ledger:
        for known in range(0, KNOWN_KEYS[-1] + KEYS, KEYS):
            keys = [hashlib.sha256(str(number).encode()).hexdigest()[:24] for number in range(known, known + KEYS)]
            began = time.process_time()
            for start in range(0, KEYS, LANES):
                with ledger.transaction():
                    counts.numbers(ledger._db, keys[start : start + LANES])
            if known in KNOWN_KEYS:
                found[str(known)] = 1e6 * (time.process_time() - began) / KEYS
    return found


def _status_field(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


# ---- every step in its own process


def in_process(*arguments: str, output: Path | None = None) -> dict[str, float]:
    """Wall time, CPU time and peak memory of `python arguments`."""
    began = time.perf_counter()
    with (output or Path(os.devnull)).open("w") as out:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, *arguments],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, out.fileno(), 1)],
        )
        _, status, usage = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(arguments)} ended with {os.waitstatus_to_exitcode(status)}")
    wall = time.perf_counter() - began
    return {"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_mb": usage.ru_maxrss / 1024}


def command(*arguments: str) -> dict[str, float]:
    return in_process("-c", "from orchestrator.cli import main; main()", *arguments)


def measure(trials: int, kept: Path | None, only: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fedsweep-scaling-") as scratch:
        folder = kept or Path(scratch) / "results"
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"  # so that no tables are cached
        found: dict[str, Any] = {}
        if not (folder / "ledger.sqlite").exists():
            output = Path(scratch) / "driver.json"
            in_process("-m", "benchmarks.scaling", "run", str(trials), "--folder", str(folder), output=output)
            found = json.loads(output.read_text())
            (folder / "driver.json").write_text(json.dumps(found))
        elif (folder / "driver.json").exists():
            found = json.loads((folder / "driver.json").read_text())
        steps: dict[str, Any] = {
            "status": lambda: command("status", str(folder)),
            "best": lambda: command("best", str(folder)),
            "tables": lambda: _rebuilt(folder),
            "tables again": lambda: _one_cell_changed(folder),
            "report": lambda: command("report", str(folder)),
            "check": lambda: command("check", str(folder)),
            "merge": lambda: _merge(folder, Path(scratch)),
        }
        for name, step in steps.items():
            if not only or name in only:
                found[name] = step()
                print(trials, name, {key: round(value, 2) for key, value in found[name].items()}, flush=True)
    return found


def _rebuilt(folder: Path) -> dict[str, float]:
    """Measure `tables` on a folder without tables."""
    for name in ("tables", "timing"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return command("tables", str(folder))


def _one_cell_changed(folder: Path) -> dict[str, float]:
    """Measure `tables` after a confirm run was removed; then record the run again."""
    with Ledger.write(folder) as ledger:
        (stage, keys) = next((stage, keys) for stage, keys in ledger.stages().items() if stage[2] == "confirm")
        rows = ledger.rows(keys[-1:])
        ledger.forget(rows, {stage: len(keys) - 1})
    measured = command("tables", str(folder))
    with Ledger.write(folder) as ledger:
        ledger.add_stage(*stage, keys[-1:], len(keys) - 1)
        ledger.add(rows.values())
    return measured


def _merge(folder: Path, scratch: Path) -> dict[str, float]:
    """Measure `merge` of two copies of the folder, each with every second trial."""
    halves = [scratch / "a", scratch / "b"]
    for number, half in enumerate(halves):
        half.mkdir()
        shutil.copy(folder / "ledger.sqlite", half)
        connection = sqlite3.connect(half / "ledger.sqlite")
        connection.execute("DELETE FROM trials WHERE number % 2 = ?", (number,))
        connection.commit()
        connection.close()
    return command("merge", *map(str, halves), "--results", str(scratch / "merged"))


def processor_name() -> str:
    fields = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    known = {name.strip(): value.strip() for name, _, value in fields}
    part = known.get("CPU part", "")  # 0xd0c: Neoverse-N1
    return known.get("model name", f"{platform.machine()}{f', CPU part {part}' if part else ''}")


def machine_and_load() -> str:
    """To be called before a measurement: the load is that of the last minute."""
    return f"{os.cpu_count()} cores, {processor_name()}, load {os.getloadavg()[0]:.1f}"


def save(section: str, name: str, found: dict[str, Any], machine: str) -> None:
    known = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    known.setdefault(section, {}).setdefault(name, {}).update({**found, "machine": machine})
    REPORT.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


# ---- the table


def table() -> str:
    known = json.loads(REPORT.read_text())
    sizes = sorted(known["trials"], key=int)
    lines = [
        f"| | bar at 10⁶ | {' | '.join(f'{int(size):,} trials' for size in sizes)} |",
        f"|---|---:|{'---:|' * len(sizes)}",
    ]
    for name, (title, bar) in BARS.items():
        section = SECTIONS.get(name, "trials")
        cells = [_cell(name, known.get(section, {}).get(size, {}).get(name)) for size in sizes]
        if not any(cells):
            continue
        lines.append(f"| {title} | {bar} | {' | '.join(cells)} |")
    return "\n".join(lines)


def desk_table() -> str:
    """The measurements of `benchmarks.desk`."""
    known = json.loads(REPORT.read_text())["desk"]
    columns = DESK_COLUMNS.items()
    lines = [f"| slots | {' | '.join(title for _, (title, _) in columns)} |", f"|---:|{'---:|' * len(columns)}"]
    for slots in sorted(known, key=int):
        found = known[slots]
        cells = [
            form.format(*(found[key] for key in (name, f"{name}_ms", f"{name}_99_ms") if key in found))
            for name, (_, form) in columns
        ]
        lines.append(f"| {int(slots):,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def slots_table() -> str:
    """The measurements of `benchmarks.slots`."""
    rows = sorted(json.loads(REPORT.read_text())["slots"].values(), key=lambda row: (row["slots"], row["seconds"]))
    lines = [
        "| slots | pack duration | packs | slots busy | processes | driver, of a core | all slots started after |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        form = "| {slots} | {seconds:g} s | {packs} | {busy:.0%} | {processes} | {driver:.0%} | {start_s:.0f} s |"
        lines.append(form.format(**row))
    return "\n".join(lines)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.startswith("driver") and name.endswith("ms"):
        return f"{value:.2f} ms"
    if name.endswith("bytes"):
        return f"{value:.0f} B"
    if name == "view_ms":
        return f"{value:.0f} ms"
    if name == "uploaded":
        return f"{value:.1f} times its size"
    return f"{value['cpu_s']:.1f} s CPU, {value['wall_s']:.1f} s, {value['peak_mb']:.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", help="numbers of trials; run N; view N; url N; keys; table")
    parser.add_argument("--folder", type=Path, help="results folder to keep")
    parser.add_argument("--only", nargs="*", default=[], help="commands to measure")
    options = parser.parse_args()
    if options.what[0] == "run":
        print(json.dumps(run(options.folder, int(options.what[1]))))
    elif options.what[0] == "table":
        print(table(), desk_table(), slots_table(), sep="\n\n")
    elif options.what[0] in ("view", "url"):
        for trials in options.what[1:]:
            machine = machine_and_load()
            found = (live_view if options.what[0] == "view" else uploads)(int(trials))
            print(trials, found, flush=True)
            save(options.what[0], trials, found, machine)
    elif options.what[0] == "keys":
        machine = machine_and_load()
        insertions = key_insertions()
        print(insertions)
        save("driver", "keys_us", insertions, machine)
    else:
        for trials in map(int, options.what):
            machine = machine_and_load()
            save("trials", str(trials), measure(trials, options.folder, options.only), machine)


if __name__ == "__main__":
    main()
