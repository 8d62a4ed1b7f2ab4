"""`make peers`: time the same private round in other simulators and in fedsweep, and write the table into
docs/performance.md. Each simulator has a virtual environment."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import numpy as np

from benchmarks import page
from benchmarks.private_round import CLASSES, CLIENTS, FEATURES, LEARNING_RATE, ROUNDS, ROWS, problem
from orchestrator.bench.workload import Workload, federation
from orchestrator.execution.cluster.connect import connected
from orchestrator.execution.packing import AUTO_LANES
from trainables.federation.federation_size import FederationSize
from trainables.federation.pack import plan_of
from trainables.federation.trial_spec import TrialSpec

HERE = Path(__file__).resolve().parent
LANES = AUTO_LANES["cpu"]
PER_EXAMPLE = "per-example clipping"


class Fedsweep(Workload):
    """The same problem in fedsweep."""

    def __init__(self, folder: Path) -> None:
        x, y = problem()
        rows = {"x_train": x.reshape(-1, FEATURES), "y_train": y.reshape(-1), "x_test": x[0], "y_test": y[0]}
        np.savez(folder / "problem.npz", **rows)
        super().__init__(str(folder / "problem.npz"), CLIENTS)
        first = self.pack(1)[0]
        theta = self.problem.model.initial(first.seed).view(FEATURES + 1, CLASSES).numpy()
        noise = plan_of(first, self.problem.partition.sizes).noise_std["gradient"]
        self.start = folder / "start.npz"
        np.savez(self.start, theta=theta, noise=noise)

    def pack(self, lanes: int) -> list[TrialSpec]:
        return self.trials(lanes, ROUNDS, method="dp-fedgd", learning_rate=LEARNING_RATE)

    def run(self) -> list[dict]:
        """One trial, and a pack of the default size, on a federation of Ray actors."""
        reports = []
        with connected(), federation(self, FederationSize(hosts=min(os.cpu_count() or 1, CLIENTS))) as started:
            for lanes in (1, LANES):
                trials = self.pack(lanes)
                started.open(trials)
                seconds = [started.seconds(t) for t in range(2, ROUNDS)]
                first = started.results(trials)[trials[0].key]
                reports.append(
                    {
                        "name": "fedsweep, one trial" if lanes == 1 else f"fedsweep, {lanes} trials in a pack",
                        "what": PER_EXAMPLE,
                        "ms_per_round": 1e3 * statistics.median(seconds) / lanes,
                        "accuracy": first.metrics["accuracy"][ROUNDS],
                    }
                )
        return reports


def peer(environment: str, script: str, start: Path) -> dict:
    """The last line of JSON that the script prints."""
    python = HERE.parent / environment / "bin" / "python"
    completed = subprocess.run([python, HERE / script, start], cwd=HERE, capture_output=True, text=True)
    reports = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith('{"name"')]
    if not reports:
        sys.exit(f"{script} ended with {completed.returncode} and no result:\n{completed.stderr[-3000:]}")
    return reports[-1]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fedsweep = Fedsweep(Path(folder))
        reports = [
            peer(".venv-flower", "peer_flower.py", fedsweep.start),
            peer(".venv-pfl", "peer_pfl.py", fedsweep.start),
            *fedsweep.run(),
        ]
    for report in reports:
        print(json.dumps(report))
    ends = [report["accuracy"] for report in reports if report["what"] == PER_EXAMPLE]
    if max(ends) - min(ends) > 2:
        sys.exit(f"the simulators did not run the same rounds: final accuracies are {ends}")
    best = reports[-1]["ms_per_round"]
    table = [
        f"`make peers` on {date.today()}, {os.cpu_count()} cores: {CLIENTS} clients x {ROWS:,} rows x {FEATURES} "
        f"features, {CLASSES} classes; {ROUNDS} rounds from the same weights with the same noise level.",
        "",
        "| | client update | ms per trial-round | relative to a pack | final accuracy |",
        "|---|---|---:|---:|---:|",
        *(
            f"| {r['name']} | {r['what']} | {r['ms_per_round']:.1f} | {r['ms_per_round'] / best:.1f}x "
            f"| {r['accuracy']:.1f} |"
            for r in reports
        ),
    ]
    page.write("peers", table)


if __name__ == "__main__":
    main()
