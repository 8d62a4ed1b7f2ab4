"""`make peers`: time the same private round in other libraries and in fedsweep, and write the table into
docs/performance.md, with a column for every machine in benchmarks/reports. Each library has a virtual environment."""

import json
import os
import platform
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
REPORTS = HERE / "reports"
PEERS = ("flower", "pfl", "opacus")
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


def measure() -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        fedsweep = Fedsweep(Path(folder))
        reports = [peer(f".venv-{name}", f"peer_{name}.py", fedsweep.start) for name in PEERS] + fedsweep.run()
    for report in reports:
        print(json.dumps(report))
    ends = [report["accuracy"] for report in reports if report["what"] == PER_EXAMPLE]
    if max(ends) - min(ends) > 2:
        sys.exit(f"the libraries did not run the same rounds: final accuracies are {ends}")
    return reports


def write_page() -> None:
    """A column for every machine that has a report."""
    machines = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(REPORTS.glob("peers-*.json"))]
    measured = "; ".join(f"{machine['name']} on {machine['date']}" for machine in machines)
    cells = []
    for machine in machines:
        reports = machine["reports"]
        best = reports[-1]["ms_per_round"]
        cells.append([f"{r['ms_per_round']:.1f} | {r['ms_per_round'] / best:.1f}x" for r in reports])
    first = machines[0]["reports"]
    table = [
        f"`make peers` ({measured}): {CLIENTS} clients x {ROWS:,} rows x {FEATURES} features, {CLASSES} classes; "
        f"{ROUNDS} rounds from the same weights with the same noise level. Times in ms per trial-round, and relative "
        "to a trial-round in a pack.",
        "",
        f"| | client update | {' | '.join(machine['name'] + ' | relative' for machine in machines)} | final accuracy |",
        "|---|---|" + "---:|---:|" * len(machines) + "---:|",
        *(
            f"| {report['name']} | {report['what']} | {' | '.join(column[row] for column in cells)} "
            f"| {report['accuracy']:.1f} |"
            for row, report in enumerate(first)
        ),
    ]
    page.write("peers", table)


def main() -> None:
    kind = "ARM" if platform.machine() in ("aarch64", "arm64") else "x86"
    machine = {"name": f"{os.cpu_count()} cores, {kind}", "date": str(date.today()), "reports": measure()}
    report = REPORTS / f"peers-{kind.lower()}.json"
    report.write_text(json.dumps(machine, indent=1) + "\n", encoding="utf-8")
    write_page()


if __name__ == "__main__":
    main()
