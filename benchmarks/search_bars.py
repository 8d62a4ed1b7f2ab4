"""Runs everything that docs/benchmark.md states about search strategies, on one machine without Ray.

python -m benchmarks.search_bars --data FOLDER --into FOLDER [--device cuda] [--processes N] [--seconds S]

Steps: time (alone on the machine), then dense tables, live regrets and frontiers on the device, while the other
processes replay searches. Whatever is complete in the folder is not run again."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

LIVE = ("cifar10-resnet20.npz", "crc5-resnet20.npz", "synthetic-frozen")
METHODS = ("dp-fedsofim", "dp-fedgd")
STRATEGIES = ("grid", "surface", "random", "optuna", "halving")
STEPS = ("time", "dense", "replay", "live", "frontier")


class Job:
    """A command with one thread and its own log."""

    def __init__(self, into: Path, name: str, *arguments: str) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.name, self._start = name, time.time()
        self._log = (into / f"{name}.log").open("a", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads},
        )

    def wait(self, deadline: float) -> None:
        try:
            status = self._process.wait(max(0.1, deadline - time.time()))
            end = "done" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
            end = "stopped at the time limit"
        self._log.close()
        print(f"{self.name}: {end} after {time.time() - self._start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with feature files and dense tables")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args()
    deadline = time.time() + options.seconds
    data, into = options.data.resolve(), options.into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    os.environ["FEDSWEEP_DATA"] = str(data)

    def left() -> str:
        return f"{max(1.0, deadline - time.time() - 5):.0f}"

    if "time" in options.steps:
        kept = ("--keep", str(into / "time"))
        Job(into, "time", "benchmarks.search_time", str(into / "time.json"), *kept).wait(deadline)
    device, repetitions = ("--device", options.device), ("--repetitions", str(options.repetitions))
    if "dense" in options.steps:
        folders = ("--data", str(data), "--into", str(into))
        Job(into, "dense", "benchmarks.dense", *folders, *device, "--seconds", left()).wait(deadline)
    jobs = []
    if "live" in options.steps:
        for name in LIVE:
            for method in METHODS:
                report = into / f"live-{Path(name).stem}-{method}.json"
                if report.exists():
                    continue
                source = str(data / name) if name.endswith(".npz") else name
                chosen = ("--select", "contest", "--strategies", *STRATEGIES, *repetitions)
                arguments = ("--data", source, "--methods", method, *chosen, *device, "--json", str(report))
                jobs.append(Job(into, report.stem, "benchmarks.regret", *arguments))
    if "frontier" in options.steps:
        sources = [str(data / name) for name in LIVE[:2]]
        jobs.append(
            Job(into, "frontier", "benchmarks.frontier", str(into / "frontier.json"), "--data", *sources, *device)
        )
    if "replay" in options.steps:
        processes = max(1, options.processes - len(jobs))
        tables = ("--tables", str(data), str(into), "--into", str(into))
        limits = ("--processes", str(processes), "--seconds", left())
        jobs.append(Job(into, "replay", "benchmarks.searches", *tables, *repetitions, *limits))
    for job in jobs:
        job.wait(deadline)


if __name__ == "__main__":
    main()
