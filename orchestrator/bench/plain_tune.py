"""Plain Ray Tune as users write it: every trial starts its own client actors."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import ray
from ray import tune

from orchestrator.bench.workload import DisagreementError, Measurement, Workload
from orchestrator.execution.backends import ray as ray_backend
from trainables.federation.federation_size import FederationSize
from trainables.ray_actors.federation import RayFederation

TRIALS, ROUNDS = 2, 50


def naive(measurement: Measurement, workload: Workload, report: dict[str, Any]) -> dict[str, Any]:
    """Time per trial, and extrapolated to all trials of `whole_search.search`, whose results `report` contains."""
    from trainables.federation.server import run_pack  # imports torch, which would count as start-up time

    trials, data, device = workload.trials(TRIALS, ROUNDS), workload.data, measurement.size.device
    size = FederationSize(len(workload.problem.partition.sizes), 0.04, 0.04 if device == "cuda" else 0.0)

    def alone(config: dict[str, Any]) -> None:
        federation = RayFederation(size, ray.util.get_current_placement_group())
        try:
            federation.open([trials[config["trial"]]], data)
            (lane,) = federation.advance(ROUNDS)
        finally:
            federation.close()
        tune.report({"accuracy": lane.metrics["accuracy"][ROUNDS], "key": lane.key})

    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fedsweep-bench-") as folder, ray_backend.quiet():
        results = tune.Tuner(
            tune.with_resources(alone, tune.PlacementGroupFactory([{}, *size.bundles])),
            param_space={"trial": tune.grid_search(list(range(TRIALS)))},
            tune_config=tune.TuneConfig(max_concurrent_trials=1),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        ).fit()
    per_trial = (time.perf_counter() - start) / TRIALS
    together = {key: lane.metrics["accuracy"][ROUNDS] for key, lane in run_pack(trials, data, device).items()}
    tolerance = 0.5 if device == "cuda" else 0.0  # rounding on a GPU depends on the clients per host
    for result in results:
        if result.error or abs(together[result.metrics["key"]] - result.metrics["accuracy"]) > tolerance:
            raise DisagreementError(f"a plain Ray Tune trial and the pack disagree: {result.error or result.metrics}")
    estimated = per_trial * report["search_trials"]
    speedup = estimated / report["search_s"]
    measurement.log(
        f"plain Ray Tune: {per_trial:.1f} s per trial, {estimated / 60:.0f} min for the search "
        f"(extrapolated from {TRIALS} trials): {speedup:.0f}x as long"
    )
    return {"naive_s_per_trial": per_trial, "naive_speedup": speedup, "naive_extrapolated_from_trials": TRIALS}
