"""How much a one-run audit shows of a run on CIFAR-10 features, how often it catches half the noise, and how often it
accuses an honest run: `python -m benchmarks.one_run [--to results/one-run]`.

DP-FedGD, 20 clients, a claim of eps = 10 at delta = 1e-5. Runs that share coins are lanes of one pack."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from trainables import methods
from trainables.audit.one_run import OneRunAudit, audit_lanes
from trainables.data import features
from trainables.data import partition as partitions
from trainables.data.sources.fetching import data_folder
from trainables.federation.problem import Problem
from trainables.federation.trial_spec import DataSpec, ProblemSpec, TrialSpec
from trainables.privacy.plan import PrivacySettings, Release

EPSILON, ROUNDS, CLIENTS = 10.0, 5, 20
HONEST: dict[Release, int] = {"local": 400, "secure-aggregation": 100}
WEAK, LANES = 40, 20
"""Number of runs with the full noise, by release model, and with half of it; runs per pack."""
CANARIES: dict[Release, int | None] = {"local": 1000, "secure-aggregation": None}


def problem_of(data: str) -> Problem:
    loaded = features.load(str(data_folder() / f"{data}.npz"))
    spec = ProblemSpec(
        data=DataSpec(fingerprint=loaded.fingerprint),
        partition=partitions.parse("iid", clients=CLIENTS, seed=42),
        train_on="all",
        evaluate_on="test",
    )
    return Problem.prepare(loaded, spec)


def audits(problem: Problem, release: Release, runs: int, noise_factor: float) -> list[OneRunAudit]:
    found: list[OneRunAudit] = []
    for pack in range(runs // LANES):
        trials = [
            TrialSpec(
                problem=problem.spec,
                method="dp-fedgd",
                hyperparameters=methods.get("dp-fedgd").check({"learning_rate": 0.5}),
                privacy=PrivacySettings(epsilon=EPSILON, clip=5.0, release=release),
                rounds=ROUNDS,
                evaluate_every=ROUNDS,
                seed=1000 * pack + lane,
            )
            for lane in range(LANES)
        ]
        found += audit_lanes(trials, problem, canaries=CANARIES[release], noise_factor=noise_factor, seed=pack)
        print(f"{release} {noise_factor:g}: {len(found)} of {runs}", flush=True)
    return found


def row(release: Release, honest: list[OneRunAudit], weak: list[OneRunAudit]) -> dict[str, object]:
    return {
        "release": release,
        "canaries": honest[0].canaries,
        "mean_bound": round(float(np.mean([one.epsilon for one in honest])), 3),
        "mean_fdp_bound": round(float(np.mean([one.fdp_epsilon for one in honest])), 3),
        "mean_plain_bound": round(float(np.mean([one.plain_epsilon for one in honest])), 3),
        "false_alarms": sum(one.caught for one in honest),
        "honest_runs": len(honest),
        "half_noise_caught": sum(one.caught for one in weak),
        "half_noise_runs": len(weak),
        "detectable_noise": round(float(np.mean([one.detectable_noise for one in honest])), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="cifar10-resnet20")
    parser.add_argument("--to", default="results/one-run")
    chosen = parser.parse_args()
    problem, began = problem_of(chosen.data), time.perf_counter()
    rows = []
    for release in CANARIES:
        rows.append(row(release, audits(problem, release, HONEST[release], 1.0), audits(problem, release, WEAK, 0.5)))
        print(json.dumps(rows[-1]), flush=True)
    folder = Path(chosen.to)
    folder.mkdir(parents=True, exist_ok=True)
    content = {"data": chosen.data, "claim": EPSILON, "rounds": ROUNDS, "clients": CLIENTS, "audits": rows}
    (folder / "one-run.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
