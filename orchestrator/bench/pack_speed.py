"""The time per round of a federation by lanes, clients, features and classes, and compared with single trials."""

from __future__ import annotations

import math
import time
from typing import Any

from orchestrator.bench.kernel_speed import gemm_rate
from orchestrator.bench.workload import (
    PAPER_SIZED,
    DisagreementError,
    MeasuredFederation,
    Measurement,
    Workload,
    federation,
)
from orchestrator.execution.packing import AUTO_LANES
from trainables.federation.lane_result import LaneResult
from trainables.federation.trial_spec import Preprocess


def lanes(measurement: Measurement, workload: Workload, started: MeasuredFederation) -> dict[str, Any]:
    """Milliseconds per trial-round by number of lanes, and the floating-point rate as a fraction of the rate of matrix
    products alone."""
    size, log = measurement.size, measurement.log
    rate = gemm_rate(size)
    where = "the GPU" if size.device == "cuda" else f"{size.hosts} cores"
    log(f"pure matrix products: {rate / 1e9:.1f} GFLOP/s on {where}")
    auto, rows = AUTO_LANES[size.device], {}
    counts, best = sorted({1, 8, 32, 128, auto}), dict[int, float]()
    for count in counts * measurement.repeated(2):  # twice: Ray may still start and stop processes in the first pass
        started.open(workload.trials(count))
        best[count] = min(best.get(count, math.inf), started.round_seconds(measurement.rounds))
    for count, seconds in best.items():
        fraction = workload.flops() * count / seconds / rate
        rows[str(count)] = {"ms_per_trial_round": 1e3 * seconds / count, "gemm_fraction": fraction}
        log(f"{count:>4} lanes: {1e3 * seconds / count:.3f} ms per trial-round, {fraction:.2f} of the GEMM rate")
    fraction = rows[str(auto)]["gemm_fraction"]
    return {"gemm_gflops": rate / 1e9, "lanes": rows, "auto_lanes": auto, "gemm_fraction": fraction}


def saturated(measurement: Measurement, workload: Workload, started: MeasuredFederation) -> dict[str, Any]:
    """Time of lanes with a saturated softmax relative to regular lanes. Saturation produces denormal numbers, which
    most x86 processors handle much more slowly unless they are flushed to zero."""
    seconds: dict[float, float] = {}
    for rate in (0.01, 1000.0) * measurement.repeated(2):
        started.open(workload.trials(32, method="dp-fedgd", learning_rate=rate), rounds=3)
        seconds[rate] = min(seconds.get(rate, math.inf), started.round_seconds(measurement.rounds, first=4))
    ratio = seconds[1000.0] / seconds[0.01]
    measurement.log(f"32 saturated lanes take {ratio:.2f} times as long as 32 regular ones")
    return {"saturated_ratio": ratio}


def centred(measurement: Measurement, workload: Workload, started: MeasuredFederation) -> dict[str, Any]:
    """Time of centred trials relative to plain ones. A pack has five seeds and four budgets, so 20 centres."""
    plain = []
    for number, trial in enumerate(workload.trials(AUTO_LANES[measurement.size.device])):
        privacy = trial.privacy.model_copy(update={"epsilon": 1.0 + number % 4})
        plain.append(trial.model_copy(update={"seed": 42 + number % 5, "privacy": privacy}))
    packs = plain, [trial.model_copy(update={"preprocess": Preprocess(center=0.02)}) for trial in plain]
    seconds = [math.inf, math.inf]
    for which in (0, 1) * measurement.repeated(3):  # alternate: the load of a shared machine varies
        started.open(packs[which])
        seconds[which] = min(seconds[which], started.round_seconds(measurement.rounds))
    ratio = seconds[1] / seconds[0]
    measurement.log(f"{len(plain)} centred lanes with 20 centres take {ratio:.2f} times as long as plain ones")
    return {"centred_ratio": ratio}


def evaluation(measurement: Measurement, workload: Workload, started: MeasuredFederation) -> dict[str, Any]:
    """Share of a run's time that evaluation takes if every tenth round is evaluated."""
    seconds: dict[int, float] = {}
    for every in (1000, 10) * measurement.repeated(3):  # alternate: the load of a shared machine varies
        started.open(workload.trials(AUTO_LANES[measurement.size.device], every=every), rounds=10)
        seconds[every] = min(seconds.get(every, math.inf), started.seconds(20), started.seconds(30))
    share = 1 - seconds[1000] / seconds[10]
    rows = len(workload.problem.y_eval)
    measurement.log(f"evaluation on {rows:,} rows every 10 rounds: {100 * share:.1f}% of a run")
    return {"evaluation_share": share}


def one_at_a_time(measurement: Measurement, workload: Workload, started: MeasuredFederation) -> dict[str, Any]:
    """Speed of a pack, relative to its first trials run one at a time on the same federation. Raises if accuracies
    differ."""
    trials, alone = workload.trials(32, 10), 2 * measurement.repeated(2)
    start = time.perf_counter()
    single: dict[str, LaneResult] = {}
    for trial in trials[:alone]:
        single |= started.results([trial])
    middle = time.perf_counter()
    packed = started.results(trials)
    end = time.perf_counter()
    for key, lane in single.items():
        one, other = lane.metrics["accuracy"], packed[key].metrics["accuracy"]
        if one != other:
            raise DisagreementError(f"one at a time gives {one}, packed {other}")
    speedup = (middle - start) / alone / ((end - middle) / len(trials))
    measurement.log(f"a pack of 32 is {speedup:.1f}x as fast as one trial at a time")
    return {"packed_speedup": speedup}


def growth(measurement: Measurement) -> dict[str, Any]:
    """Milliseconds per trial-round of 32 lanes for more clients, features or classes."""
    milliseconds: dict[str, float] = {}
    cases = {
        **{f"clients={clients}": (PAPER_SIZED, clients) for clients in (20, 200, 2000)},
        "features=512": ("synthetic-frozen:50000,1000,512,10", 20),
        "classes=100": ("synthetic-frozen:50000,1000,64,100", 20),
    }
    for name, (data, clients) in {} if measurement.quick else cases.items():
        workload = Workload(data, clients)
        with federation(workload, measurement.size) as started:
            started.open(workload.trials(32))
            milliseconds[name] = 1e3 * started.round_seconds(3) / 32
        measurement.log(f"{name}: {milliseconds[name]:.2f} ms per trial-round")
    return {"growth_ms_per_trial_round": milliseconds}
