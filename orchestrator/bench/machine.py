"""`fedsweep bench`: how fast this machine sweeps, compared with slower ways to run the same trials.

All numbers of a report come from one run on one machine, so their ratios are meaningful. The benchmark fails if two
ways to compute the same trial give different results.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import tune

from orchestrator.bench.clock import FIRST_ROUND, Clock, process_start
from orchestrator.execution import study_run
from orchestrator.execution.backends import ray as ray_backend
from orchestrator.execution.cluster import nodes
from orchestrator.execution.cluster.connect import connected
from orchestrator.execution.packing import AUTO_LANES, cluster_capacity
from orchestrator.results.ledger import Ledger
from orchestrator.study.reading import parse
from orchestrator.study.settings.resources import ResourceSettings
from trainables import methods
from trainables.choices import PRECISIONS, Precision
from trainables.data import features, partition
from trainables.federation.federation_size import FederationSize
from trainables.federation.lane_result import LaneResult
from trainables.federation.problem import Problem
from trainables.federation.trial_spec import DataSpec, ProblemSpec, TrialSpec
from trainables.lazy import torch
from trainables.models import kernels
from trainables.models import lanes as lane_shapes
from trainables.models.products import Products
from trainables.models.shard import Shard, pitch
from trainables.models.softmax import SoftmaxHead
from trainables.privacy.noise import Address
from trainables.privacy.plan import PrivacySettings
from trainables.ray_actors.federation import HostActor, RayFederation
from trainables.ray_actors.object_store import ObjectStoreProblems

PAPER_SIZED = "synthetic-frozen"
SEARCH = """
name: bench
data: [synthetic-frozen]
partitions: [iid]
methods: [dp-fedsofim]
epsilons: [10]
seeds: {search: 42, confirm: [42, 123, 7]}
search: {select: single, refine: table}
"""
NAIVE_CLIENTS = 20


class DisagreementError(RuntimeError):
    """Two ways to compute the same trial gave different results."""


def bench(quick: bool, log: Callable[[str], None]) -> dict[str, Any]:
    began = process_start()
    with connected():
        size = cluster_capacity(nodes.node_resources(), ResourceSettings(), NAIVE_CLIENTS).size
        workload = _Workload(PAPER_SIZED, clients=20)
        with workload.federation(size) as federation:
            federation.open(workload.trials(1), workload.data)
            federation.advance(1)
            report: dict[str, Any] = {
                "startup_s": time.time() - began,
                "device": _device_name(size),
                "hosts": size.hosts,
                "kernel": kernels.chosen(size.device),
            }
            log(f"{report['device']}, {size.hosts} client host(s), kernel: {report['kernel']}")
            log(f"start-up to first round: {report['startup_s']:.1f} s")
            report |= _lanes(workload, federation, size, quick, log)
            report |= _saturated(workload, federation, quick, log)
            report |= _evaluation(workload, federation, report, quick, log)
            report |= _one_at_a_time(workload, federation, quick, log)
        report |= _messages(workload, log)
        report |= _per_example(workload, size.device, log)
        report |= _noise(size.device, log)
        if size.device == "cuda" and not quick:
            report |= _wide(log)
        report["growth_ms_per_trial_round"] = {} if quick else _growth(size, log)
        report |= _search(log)
        report |= _naive(workload, report, size.device, 2, log)
    return report


# ---- the workload


def problem_of(name: str, clients: int) -> Problem:
    """All rows of a data set, split evenly among the clients."""
    data = features.load(name)
    spec = ProblemSpec(
        data=DataSpec(fingerprint=data.fingerprint),
        partition=partition.parse("iid", clients=clients, seed=42),
        train_on="all",
        evaluate_on="test",
    )
    return Problem.prepare(data, spec)


class _Workload:
    """A problem in the object store, and trials of it."""

    def __init__(self, name: str, clients: int) -> None:
        self.problem = problem_of(name, clients)
        self.data = ObjectStoreProblems().data(self.problem)

    def trials(
        self, count: int, rounds: int = 1000, every: int | None = None, method: str = "dp-fedsofim", **hypers: float
    ) -> list[TrialSpec]:
        """Trials that differ only in their clipping bound."""
        return [
            TrialSpec(
                problem=self.problem.spec,
                method=method,
                hyperparameters=methods.get(method).check(hypers),
                privacy=PrivacySettings(epsilon=10, clip=10 - 0.001 * index),
                rounds=rounds,
                evaluate_every=every or rounds,
            )
            for index in range(count)
        ]

    @contextmanager
    def federation(self, size: FederationSize) -> Iterator[RayFederation]:
        federation = RayFederation(size)
        try:
            yield federation
        finally:
            federation.close()

    def flops(self) -> float:
        """Floating-point operations of the two matrix products of one trial-round."""
        return 4.0 * sum(self.problem.partition.sizes) * self.problem.model.dimension


def _time_rounds(federation: RayFederation, rounds: int, first: int) -> float:
    """Median seconds per round, with several rounds per call as in a sweep."""
    seconds = []
    for t in range(first, first + 3 * rounds, rounds):
        start = time.perf_counter()
        federation.progress(t + rounds - 1)
        seconds.append((time.perf_counter() - start) / rounds)
    return statistics.median(seconds)


# ---- measurements


def _lanes(
    workload: _Workload, federation: RayFederation, size: FederationSize, quick: bool, log: Callable[[str], None]
) -> dict[str, Any]:
    """Milliseconds per trial-round by number of lanes, and the fraction of the rate of pure matrix products."""
    rate = _gemm_rate(size)
    log(f"pure matrix products: {rate / 1e9:.1f} GFLOP/s on {size.hosts} cores")
    auto = AUTO_LANES[size.device]
    rows, counts, best = {}, sorted({1, 8, 32, 128, auto}), dict[int, float]()
    for count in counts if quick else counts * 2:  # twice, because Ray still starts and stops processes
        federation.open(workload.trials(count), workload.data)
        federation.advance(1)
        best[count] = min(best.get(count, math.inf), _time_rounds(federation, 3 if quick else 6, 2))
    for count, seconds in best.items():
        fraction = workload.flops() * count / seconds / rate
        rows[str(count)] = {"ms_per_trial_round": 1e3 * seconds / count, "gemm_fraction": fraction}
        log(f"{count:>4} lanes: {1e3 * seconds / count:.3f} ms per trial-round, {fraction:.2f} of the GEMM rate")
    return {
        "gemm_gflops": rate / 1e9,
        "lanes": rows,
        "auto_lanes": auto,
        "gemm_fraction": rows[str(auto)]["gemm_fraction"],
    }


def _gemm_rate(size: FederationSize) -> float:
    """Floating-point operations per second of the kernel's two matrix products, on as many cores as there are hosts at
    once, or on the GPU."""

    def measure(device: str) -> float:
        torch.set_num_threads(1)
        shape = lane_shapes.SHAPES[device]
        rows = shape.rows(10)
        x, w = torch.rand(rows, 65, device=device), torch.rand(65, 10 * shape.lanes, device=device)
        z, g = torch.mm(x, w), torch.zeros(65, 10 * shape.lanes, device=device)
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < 1.0:
            for _ in range(10):
                torch.mm(x, w, out=z)
                g.addmm_(x.t(), z)
            if device == "cuda":
                torch.cuda.synchronize()
            count += 10
        return count * 4.0 * x.numel() * w.shape[1] / (time.perf_counter() - start)

    if size.device == "cuda":
        return measure("cuda") if torch.cuda.is_available() else float("nan")
    task = ray.remote(num_cpus=0)(measure)
    ray.get([task.remote("cpu") for _ in range(size.hosts)])  # warm-up: start processes, import torch
    return sum(ray.get([task.remote("cpu") for _ in range(size.hosts)]))


def _saturated(
    workload: _Workload, federation: RayFederation, quick: bool, log: Callable[[str], None]
) -> dict[str, Any]:
    """Time of lanes with a saturated softmax relative to regular lanes. Saturation produces denormal numbers, which
    some processors handle several times slower."""
    seconds: dict[str, float] = {}
    for name, rate in (("regular", 0.01), ("saturated", 1000.0)) * (1 if quick else 2):
        federation.open(workload.trials(32, method="dp-fedgd", learning_rate=rate), workload.data)
        federation.advance(3)
        seconds[name] = min(seconds.get(name, math.inf), _time_rounds(federation, 3 if quick else 6, 4))
    ratio = seconds["saturated"] / seconds["regular"]
    log(f"32 saturated lanes take {ratio:.2f} times as long as 32 regular ones")
    return {"saturated_ratio": ratio}


def _evaluation(
    workload: _Workload, federation: RayFederation, report: dict[str, Any], quick: bool, log: Callable[[str], None]
) -> dict[str, Any]:
    """Share of evaluation in a run that evaluates every tenth round."""
    seconds: dict[int, float] = {}
    for every in (1000, 10) * (1 if quick else 3):  # alternate: the load of a shared machine varies
        federation.open(workload.trials(report["auto_lanes"], every=every), workload.data)
        federation.progress(10)
        for until in (20, 30):
            start = time.perf_counter()
            federation.progress(until)
            seconds[every] = min(seconds.get(every, math.inf), time.perf_counter() - start)
    share = 1 - seconds[1000] / seconds[10]
    log(f"evaluation on {len(workload.problem.y_eval):,} rows every 10 rounds: {100 * share:.1f}% of a run")
    return {"evaluation_share": share}


def _messages(workload: _Workload, log: Callable[[str], None]) -> dict[str, Any]:
    """Messages to and from one host in a round, which must not depend on the number of local steps."""
    # imported here: they import torch, which would count as start-up time
    from trainables.federation.server import Server
    from trainables.ray_actors.remote_hosts import RemoteHosts

    counts = {}
    for name, trials in {
        "dp-fedsofim": workload.trials(8),
        "dp-scaffold, 1 local step": workload.trials(8, method="dp-scaffold", local_steps=1),
        "dp-scaffold, 10 local steps": workload.trials(8, method="dp-scaffold", local_steps=10),
    }.items():
        actor = ray.remote(HostActor).options(num_cpus=0).remote(0, "cpu", kernels.chosen())
        counting = _CountingHandle(actor)
        server = Server(RemoteHosts([counting]))
        server.open(trials, workload.data)
        server.advance(1)
        before = counting.messages
        server.advance(3)
        counts[name] = (counting.messages - before) / 2
        ray.kill(actor)
    most = max(counts.values())
    log(f"messages to and from a host per round: {most:g}, for any number of local steps")
    if len(set(counts.values())) > 1:
        raise DisagreementError(f"messages per round depend on the method: {counts}")
    return {"messages_per_round_and_host": most}


class _CountingHandle:
    """An actor handle that counts messages: every call and its reply."""

    def __init__(self, handle: Any) -> None:
        self._handle, self.messages = handle, 0

    def __getattr__(self, name: str) -> Any:
        return _CountedMethod(self, getattr(self._handle, name))


class _CountedMethod:
    def __init__(self, counter: _CountingHandle, method: Any) -> None:
        self._counter, self._method = counter, method

    def remote(self, *arguments: Any) -> Any:
        self._counter.messages += 2
        return self._method.remote(*arguments)


def _one_at_a_time(
    workload: _Workload, federation: RayFederation, quick: bool, log: Callable[[str], None]
) -> dict[str, Any]:
    """The same trials one at a time and in a pack, on the same federation."""
    rounds, alone = 10, 2 if quick else 4
    trials = workload.trials(32, rounds)
    start = time.perf_counter()
    single: dict[str, LaneResult] = {}
    for trial in trials[:alone]:
        federation.open([trial], workload.data)
        single |= {lane.key: lane for lane in federation.advance(rounds)}
    seconds_alone = (time.perf_counter() - start) / alone
    start = time.perf_counter()
    federation.open(trials, workload.data)
    packed = {lane.key: lane for lane in federation.advance(rounds)}
    seconds_packed = (time.perf_counter() - start) / len(trials)
    for key, lane in single.items():
        _agree("one at a time", lane, "packed", packed[key])
    speedup = seconds_alone / seconds_packed
    log(f"a pack of 32 is {speedup:.1f}x as fast as one trial at a time")
    return {"packed_speedup": speedup}


def _per_example(workload: _Workload, device: str, log: Callable[[str], None]) -> dict[str, Any]:
    """One round of all clients in one process: the closed form compared with per-example gradients in memory."""
    problem, clip = workload.problem, 10.0
    head = SoftmaxHead(problem.data.features, problem.data.classes)
    theta = head.initial(42).to(device)
    shards = [
        Shard.build([(problem.data.x_train[rows], problem.data.y_train[rows])], device)
        for rows in problem.partition.rows
    ]
    labels = torch.eye(head.classes, device=device)

    def plain(shard: Shard) -> torch.Tensor:
        x, y = shard.x[0], labels[shard.y[0]]
        residual = torch.softmax(x @ theta.view(head.rows, head.classes), 1) - y
        gradients = x.unsqueeze(2) * residual.unsqueeze(1)
        norms = gradients.flatten(1).norm(dim=1)
        return (gradients * (clip / norms).clamp(max=1).view(-1, 1, 1)).sum(0).flatten()

    lanes = 32
    many, bounds = theta.expand(lanes, -1), torch.full((lanes,), clip, device=device)

    def timed(sums: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], float]:
        sums()  # warm-up
        _synchronise(device)
        start = time.perf_counter()
        result = sums()
        _synchronise(device)
        return result, time.perf_counter() - start

    expected, seconds_plain = timed(lambda: [plain(shard) for shard in shards])
    closed, seconds_closed = timed(
        lambda: [head.clipped_gradient_sum(shard, many, bounds)[0][0, 0] for shard in shards]
    )
    seconds_closed /= lanes
    for one, other in zip(expected, closed, strict=True):
        if not torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-2):
            raise DisagreementError("per-example gradients and the closed form give different sums")
    speedup = seconds_plain / seconds_closed
    log(f"the closed form in 32 lanes is {speedup:.1f}x as fast as per-example gradients in memory")
    return {"per_example_ms": 1e3 * seconds_plain, "per_example_speedup": speedup}


def _noise(device: str, log: Callable[[str], None]) -> dict[str, Any]:
    """Time to draw the noise of one client in one round."""
    clients, size = 2000, 650
    if kernels.chosen(device) == "triton":
        from trainables.privacy import noise_triton

        here, seeds = torch.arange(clients, device=device), torch.tensor([42], device=device)

        def draw(t: int) -> None:
            noise_triton.normals(here, seeds, t, 0, "gradient", size)
    else:

        def draw(t: int) -> None:
            for client in range(clients):
                Address(42, client, t, 0, "gradient").normal(size)

    draw(0)
    _synchronise(device)
    start = time.perf_counter()
    for t in range(3):
        draw(1 + t)
    _synchronise(device)
    per_client = (time.perf_counter() - start) / 3 / clients
    log(f"noise of one client in one round ({size} numbers): {1e6 * per_client:.2f} us")
    return {"noise_us_per_client": 1e6 * per_client}


def _wide(log: Callable[[str], None]) -> dict[str, Any]:
    """The gradients of a round on features of ImageNet's shape, in one block of lanes."""
    rounds = {precision: _wide_round(precision) for precision in PRECISIONS}
    for precision, measured in rounds.items():
        log(
            f"1.28 M rows x 1,024 features, 1,000 classes, {precision}: {measured['ms_per_trial_round']:.1f} ms per "
            f"trial-round, {measured['gemm_fraction']:.2f} of the rate of its matrix products"
        )
    return {"wide": rounds}


def _wide_round(precision: Precision) -> dict[str, float]:
    clients, rows, features_, classes = 20, 64_000, 1024, 1000
    head, shape = SoftmaxHead(features_, classes), lane_shapes.SHAPES["cuda"]
    products = Products(precision)
    whole_rows = torch.randn(clients, rows, pitch(head.rows, "cuda"), device="cuda").div_(32)
    whole_rows[..., features_] = 1
    x = products.rounded(whole_rows)[..., : head.rows]
    norm = torch.linalg.vector_norm(x, dim=2, keepdim=True, dtype=torch.float32)
    labels = torch.randint(0, classes, (clients, rows), device="cuda")
    shard = Shard(x, norm, labels, torch.full((clients, 1, 1), float(rows), device="cuda"), precision)
    theta = 0.01 * torch.randn(shape.lanes, head.dimension, device="cuda")
    clip = torch.full((shape.lanes,), 10.0, device="cuda")
    whole = _best_of(2, lambda: head.clipped_gradient_sum(shard, theta, clip))
    _, step = shape.chunk(classes, clients)
    chunk, columns = shard.padded[:1, :step], classes * shape.lanes
    right = products.rounded(torch.randn(1, chunk.shape[2], columns, device="cuda"))
    left = products.rounded(torch.randn(1, step, columns, device="cuda"))
    alone = _best_of(5, lambda: (products.of(chunk, right), products.of(chunk.mT, left))) * clients * rows / step
    return {"ms_per_trial_round": 1e3 * whole / shape.lanes, "gemm_fraction": alone / whole}


def _best_of(times: int, work: Callable[[], Any]) -> float:
    """Best GPU time in seconds, after one warm-up run."""
    seconds = []
    for _ in range(times + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _growth(size: FederationSize, log: Callable[[str], None]) -> dict[str, float]:
    """Milliseconds per trial-round of 32 lanes for more clients, features or classes."""
    milliseconds = {}
    for name, data, clients in (
        ("clients=20", PAPER_SIZED, 20),
        ("clients=200", PAPER_SIZED, 200),
        ("clients=2000", PAPER_SIZED, 2000),
        ("features=512", "synthetic-frozen:50000,1000,512,10", 20),
        ("classes=100", "synthetic-frozen:50000,1000,64,100", 20),
    ):
        workload = _Workload(data, clients)
        with workload.federation(size) as federation:
            federation.open(workload.trials(32), workload.data)
            federation.advance(1)
            milliseconds[name] = 1e3 * _time_rounds(federation, 3, 2) / 32
        log(f"{name}: {milliseconds[name]:.2f} ms per trial-round")
    return milliseconds


def _search(log: Callable[[str], None]) -> dict[str, Any]:
    """A coarse and fine search of DP-FedSOFIM on data of the paper's size, from the study to the tables."""
    folder = Path(tempfile.mkdtemp(prefix="fedsweep-bench-"))
    try:
        start, clock = time.time(), Clock()
        with _PeakMemory() as memory:
            study_run.run(parse(SEARCH, "bench", folder), SEARCH, folder / "r", clock)
        end = time.time()
        with Ledger.read(folder / "r") as ledger:
            stages = ledger.stages()
        searched = {key for (_, _, stage), keys in stages.items() if stage != "confirm" for key in keys}
        everything = {key for keys in stages.values() for key in keys}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # time outside rounds, from the first round to the last table: scheduling, ledger, selection, tables
    overhead = clock.federations * (end - clock.began - clock.marks[FIRST_ROUND]) - clock.computing_s
    log(
        f"search of DP-FedSOFIM ({len(searched)} trials and the confirm runs), study to tables: {end - start:.1f} s, "
        f"of which {clock.computing_s:.1f} s in rounds"
    )
    log(f"overhead of the orchestrator relative to the rounds: {100 * overhead / clock.computing_s:.1f}%")
    log(f"peak memory of all its processes: {memory.peak / 2**30:.2f} GiB")
    return {
        "search_s": end - start,
        "search_trials": len(searched),
        "overhead_fraction": overhead / clock.computing_s,
        "overhead_ms_per_trial": 1e3 * overhead / len(everything),
        "peak_memory_bytes": memory.peak,
    }


def _naive(
    workload: _Workload, report: dict[str, Any], device: str, count: int, log: Callable[[str], None]
) -> dict[str, Any]:
    """Plain Ray Tune: every trial starts its own 20 client actors."""
    trials = workload.trials(count, 50)
    data = workload.data
    size = FederationSize(NAIVE_CLIENTS, 0.04, 0.04 if device == "cuda" else 0.0)

    def alone(config: dict[str, Any]) -> None:
        federation = RayFederation(size, ray.util.get_current_placement_group())
        try:
            federation.open([config["trial"].trial], data)
            (lane,) = federation.advance(50)
        finally:
            federation.close()
        tune.report({"accuracy": lane.metrics["accuracy"][50], "key": lane.key})

    bundles = [size.host_bundle] * NAIVE_CLIENTS
    folder = tempfile.mkdtemp(prefix="fedsweep-bench-")
    from trainables.federation.hosts import Hosts
    from trainables.federation.server import Server

    start = time.perf_counter()
    try:
        with ray_backend.quiet():
            results = tune.Tuner(
                tune.with_resources(alone, tune.PlacementGroupFactory([{}, *bundles])),
                param_space={"trial": tune.grid_search([_Opaque(trial) for trial in trials])},
                tune_config=tune.TuneConfig(max_concurrent_trials=1),
                run_config=tune.RunConfig(storage_path=folder, verbose=0),
            ).fit()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    per_trial = (time.perf_counter() - start) / count
    server = Server(Hosts(1, device), device)
    server.open(trials, data)
    together = {lane.key: lane.metrics["accuracy"][50] for lane in server.advance(50)}
    tolerance = (
        0.5 if device == "cuda" else 0.0
    )  # points of accuracy; rounding on a GPU depends on the clients per host
    for result in results:
        if result.error or abs(together[result.metrics["key"]] - result.metrics["accuracy"]) > tolerance:
            raise DisagreementError(f"a plain Ray Tune trial and the pack disagree: {result.error or result.metrics}")
    estimated = per_trial * report["search_trials"]
    speedup = estimated / report["search_s"]
    log(
        f"plain Ray Tune: {per_trial:.1f} s per trial, {estimated / 60:.0f} min for the search "
        f"(extrapolated from {count} trials): {speedup:.0f}x as long"
    )
    return {"naive_s_per_trial": per_trial, "naive_speedup": speedup, "naive_extrapolated_from_trials": count}


class _Opaque:
    """Wraps a trial so that Tune neither copies nor prints it."""

    def __init__(self, trial: TrialSpec) -> None:
        self.trial = trial

    def __deepcopy__(self, memo: Any) -> _Opaque:
        return self

    def __repr__(self) -> str:
        return self.trial.key


# ---- helpers


def _agree(first: str, one: LaneResult, second: str, other: LaneResult) -> None:
    if one.metrics["accuracy"] != other.metrics["accuracy"]:
        raise DisagreementError(f"{first} gives {one.metrics['accuracy']}, {second} {other.metrics['accuracy']}")


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _device_name(size: FederationSize) -> str:
    if size.device == "cuda":
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cuda"
    return f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"


class _PeakMemory:
    """Peak memory of this process and all its descendants together, counting shared pages once."""

    def __init__(self) -> None:
        self.peak = 0
        self._end = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _PeakMemory:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._end.wait(1.0):
            self.peak = max(self.peak, sum(_proportional_bytes(pid) for pid in _descendants(os.getpid())))


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue  # the process has ended
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    pids, queue = [], [root]
    while queue:
        pid = queue.pop()
        pids.append(pid)
        queue += children.get(pid, [])
    return pids


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
