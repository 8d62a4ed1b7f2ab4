"""`make peers`: the same private round through other simulators and through ours, in one run; the table goes into
docs/performance.md. The simulators live in environments of their own."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np

from benchmarks import page
from benchmarks.private_round import CLASSES, CLIENTS, CLIP, FEATURES, LEARNING_RATE, ROUNDS, ROWS, problem
from orchestrator.bench.machine import problem_of
from orchestrator.execution.cluster.connect import connected
from orchestrator.execution.packing import AUTO_LANES
from trainables import methods
from trainables.federation.pack import plan_of
from trainables.federation.problem import Shipper
from trainables.federation.trial_spec import TrialSpec
from trainables.privacy.plan import PrivacySettings
from trainables.ray_actors.federation import Federation, FederationSize

HERE = Path(__file__).resolve().parent
LANES = AUTO_LANES["cpu"]
PER_EXAMPLE = "per-example clipping"


class Ours:
    """The problem as a federation of real actors has it."""

    def __init__(self, folder: Path) -> None:
        x, y = problem()
        rows = {"x_train": x.reshape(-1, FEATURES), "y_train": y.reshape(-1), "x_test": x[0], "y_test": y[0]}
        np.savez(folder / "problem.npz", **rows)
        self.problem = problem_of(str(folder / "problem.npz"), CLIENTS)
        first = self.trials(1)[0]
        theta = self.problem.model.initial(first.seed).view(FEATURES + 1, CLASSES).numpy()
        noise = plan_of(first, self.problem.partition.sizes).noise_std["gradient"]
        self.start = folder / "start.npz"
        np.savez(self.start, theta=theta, noise=noise)

    def trials(self, count: int) -> list[TrialSpec]:
        return [
            TrialSpec(
                problem=self.problem.spec,
                method="dp-fedgd",
                hyperparameters=methods.get("dp-fedgd").check({"learning_rate": LEARNING_RATE}),
                privacy=PrivacySettings(epsilon=10, clip=CLIP - 0.001 * lane),
                rounds=ROUNDS,
                evaluate_every=ROUNDS,
            )
            for lane in range(count)
        ]

    def run(self) -> list[dict]:
        """One trial, and as many as a pack has by default."""
        reports = []
        with connected():
            federation = Federation(FederationSize(hosts=min(os.cpu_count() or 1, CLIENTS)))
            shipment = Shipper().ship(self.problem)
            for lanes in (1, LANES):
                federation.open(self.trials(lanes), shipment)
                federation.advance(1)
                taken = []
                for t in range(2, ROUNDS):
                    start = time.perf_counter()
                    federation.progress(t)
                    taken.append(time.perf_counter() - start)
                (first, *_) = federation.advance(ROUNDS)
                reports.append(
                    {
                        "name": "fedsweep, one trial" if lanes == 1 else f"fedsweep, {lanes} trials in a pack",
                        "what": PER_EXAMPLE,
                        "ms_per_round": 1e3 * statistics.median(taken) / lanes,
                        "accuracy": first.metrics["accuracy"][ROUNDS],
                    }
                )
            federation.close()
        return reports


def peer(environment: str, script: str, start: Path) -> dict:
    """What the script says of itself in its last line of JSON."""
    python = HERE.parent / environment / "bin" / "python"
    ran = subprocess.run([python, HERE / script, start], cwd=HERE, capture_output=True, text=True)
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"name"')]
    if not found:
        sys.exit(f"{script} ended with {ran.returncode} and no result:\n{ran.stderr[-3000:]}")
    return found[-1]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(Path(folder))
        reports = [
            peer(".venv-flower", "peer_flower.py", ours.start),
            peer(".venv-pfl", "peer_pfl.py", ours.start),
            *ours.run(),
        ]
    for report in reports:
        print(json.dumps(report))
    ends = [report["accuracy"] for report in reports if report["what"] == PER_EXAMPLE]
    if max(ends) - min(ends) > 2:
        sys.exit(f"these are not the same rounds: they end at accuracies of {ends}")
    best = reports[-1]["ms_per_round"]
    table = [
        f"`make peers` on {date.today()}, {os.cpu_count()} cores: {CLIENTS} clients x {ROWS:,} rows x {FEATURES} "
        f"features, {CLASSES} classes; {ROUNDS} rounds from the same weights with noise of the same size.",
        "",
        "| | a client's update | ms a trial-round | against a pack | accuracy at the end |",
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
