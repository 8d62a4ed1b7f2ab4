"""What a study would run, and an estimate of its duration and memory. Starts nothing."""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.execution import machine_speed
from orchestrator.execution.cell_search import CellSearch
from orchestrator.execution.host_memory import lanes_bytes, within_memory
from orchestrator.execution.pack_cost import PackCost
from orchestrator.execution.packing import Capacity, cluster_capacity, make_packs
from orchestrator.study.advice import advice
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.study import Study
from trainables.data.stored import StoredRows
from trainables.federation.machine_memory import machine_bytes
from trainables.federation.trial_spec import TrialSpec
from trainables.models import kernels

# speed of trial-rounds, as a share of a core's speed for matrix products (measured by fedsweep bench)
GEMM_SHARE = {"compiled": 0.6, "torch": 0.4}
GPU_RATE = 8.7e12  # operations per second of whole trial-rounds, in a search with packs of 2,048 lanes on one H200
START_S = 12  # to start Ray and the federations
MAX_PLACEHOLDERS = 100  # distinct configurations that stand in for the unknown configurations of a later stage
PROCESS_BYTES = 350 << 20  # a Python process that has imported torch


@dataclass(frozen=True)
class Plan:
    study: str
    cells: int
    strategies: int
    """Number of search variants per cell."""
    trials: dict[str, int]
    """By stage. In a stage that starts at once, a trial that several cells or stages share counts once, as in `run`.
    Shared trials of later stages are not known yet, and count several times."""
    exact: bool
    """Whether exactly these trials run if none fails. If False, the number depends on results."""
    may_add_stages: bool
    """Whether results can add stages that are not counted: finer grids."""
    packs: dict[str, int]
    trial_rounds: int
    seconds: float
    bytes: int
    machine_bytes: int
    """The memory of this machine or cluster."""
    federations: int
    hosts: int
    device: str
    where: str
    load: float
    """Load average of this machine; 0 for a GPU or a cluster."""
    clients: list[str]
    """For every data set and partition, how many clients there are, and where they come from."""
    notes: list[str]
    """Values of tables that were replaced, and settings of the study that may not have the expected effect."""

    @property
    def _busy(self) -> str:
        return f", which is busy (load {self.load:.1f})" if self.load > 1 else ""

    def as_text(self) -> str:
        minutes = self.seconds / 60
        stages = ", ".join(f"{count} {stage}" for stage, count in self.trials.items())
        packs = ", ".join(f"{count} {stage}" for stage, count in self.packs.items())
        return "\n".join(
            [
                f"study {self.study}: {self.cells} cell{'s' if self.cells > 1 else ''}"
                + (f", each searched with {self.strategies} variants" if self.strategies > 1 else ""),
                *self.clients,
                f"trials: {'' if self.exact else 'about '}{sum(self.trials.values())} ({stages})"
                + (", and more where a winner calls for a finer grid" if self.may_add_stages else ""),
                f"packs: {sum(self.packs.values())} ({packs})",
                f"trial-rounds: {self.trial_rounds}",
                f"on {self.where}{self._busy}: {self.federations} federation(s) of {self.hosts} client host(s)"
                + (" on GPUs" if self.device == "cuda" else "")
                + ", about "
                + (f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h")
                + f" with Ray's start, and {self.bytes / 2**30:.1f} GiB of memory"
                + (
                    f", more than the {self.machine_bytes / 2**30:.1f} it has"
                    if self.bytes > self.machine_bytes
                    else ""
                ),
                *(f"note: {sentence}" for sentence in self.notes),
            ]
        )


def plan(study: Study, nodes: Sequence[dict[str, float]] | None = None) -> Plan:
    """Plan for this machine, or for `nodes` with these resources, whose cores are assumed to be as fast as this
    machine's."""
    prepared = PreparedStudy.prepare(study)
    study = prepared.study
    available = nodes
    if available is None:
        from orchestrator.execution.cluster.connect import local_resources  # imports Ray

        available = local_resources()
    capacity = cluster_capacity(available, study.resources, prepared.most_clients)
    capacity = within_memory(capacity, study.resources, prepared.most_weights, nodes or ())
    searches = [
        CellSearch(cell, variant, {}, prepared.validation_rows(cell.setting))
        for cell in prepared.cells
        for variant in study.variants
    ]
    trials: Counter[str] = Counter()
    packs: Counter[str] = Counter()
    counted: set[str] = set()
    rounds = 0
    operations = overhead_s = 0.0
    device = capacity.size.device
    for stage in study.stages:
        by_batch: dict[int, dict[str, TrialSpec]] = defaultdict(dict)
        for search in searches:
            size = _batch_size(search, stage)
            for number, trial in enumerate(_stage_trials(search, stage)):
                by_batch[number // size][trial.key] = trial
        batches = []
        for by_key in by_batch.values():
            batches.append([trial for key, trial in by_key.items() if key not in counted])
            counted.update(by_key)
        new_trials = [trial for batch in batches for trial in batch]
        if not new_trials:
            continue
        # the trials of a stage that starts at once are known, so those that searches share count once
        opened = any(stage in search.stages for search in searches)
        trials[stage] = len(new_trials) if opened else sum(search.trials_to_come().get(stage, 0) for search in searches)
        stage_packs = [pack for batch in batches for pack in make_packs(batch, capacity)]
        packs[stage] = len(stage_packs)
        for pack in stage_packs:
            problem = prepared.problems[pack[0].problem.key]
            rounds += sum(trial.last_round for trial in pack)
            cost = PackCost.of(pack, problem, device)
            operations += cost.operations
            overhead_s += cost.overhead_s
    load = os.getloadavg()[0] if device == "cpu" and nodes is None else 0.0
    return Plan(
        study=study.name,
        cells=len(prepared.cells),
        strategies=len(study.variants),
        trials=dict(trials),
        exact=study.trials_are_exact,
        may_add_stages=study.may_add_stages,
        packs=dict(packs),
        trial_rounds=rounds,
        seconds=_seconds(operations, overhead_s, capacity, load if nodes is None else None),
        bytes=_memory(prepared, capacity),
        machine_bytes=machine_bytes() if nodes is None else sum(int(n.get("memory", 0)) for n in nodes) or 1 << 62,
        federations=capacity.federations,
        hosts=capacity.size.hosts,
        device=device,
        where="this machine" if nodes is None else f"a cluster of {len(nodes)} nodes",
        load=load,
        clients=prepared.clients(),
        notes=[*prepared.data_notes(), *advice(study)],
    )


def _seconds(operations: float, overhead_s: float, capacity: Capacity, load: float | None) -> float:
    """Estimated duration. `load`: the load average of this machine; None for a cluster, where it is not known."""
    if capacity.size.device == "cuda":
        gpus = capacity.federations * capacity.size.gpus_per_host * capacity.size.hosts
        return START_S + operations / (GPU_RATE * gpus)
    processes = capacity.federations * capacity.size.hosts
    slowdown = 1.0 if load is None else contention(load, processes, os.cpu_count() or 1)
    rate = machine_speed.gemm_rate() * GEMM_SHARE[kernels.chosen("cpu")] * processes / slowdown
    return START_S * slowdown + operations / rate + overhead_s * slowdown / processes


def _stage_trials(search: CellSearch, stage: str) -> list[TrialSpec]:
    """The trials of a stage, or the same number of placeholders if the trials depend on results."""
    count = search.trials_to_come().get(stage, 0)
    if not count:
        return []
    fixed = search.variant.strategy.fixed_configurations(search.task)
    if stage in fixed:
        trials = search.trials(stage, fixed[stage])
        if stage == next(iter(fixed)):  # starts at once
            search.open(stage, trials)
        return trials
    space = search.cell.space
    grid = space.grid(space.coarse)
    if len(grid) > MAX_PLACEHOLDERS:
        grid = [grid[n * len(grid) // MAX_PLACEHOLDERS] for n in range(MAX_PLACEHOLDERS)]
    if search.variant.strategy.publishes_only_winner:
        placeholders = [search.cell.private_trial(configuration, 0, "validation") for configuration in grid]
    else:
        placeholders = search.trials(stage, grid)
    return [
        placeholders[n % len(placeholders)].model_copy(update={"code": f"{search.name} {stage} {n}"})
        for n in range(count)
    ]


def _batch_size(search: CellSearch, stage: str) -> int:
    """The trials of a stage that run at the same time."""
    strategy = search.variant.strategy
    configurations = strategy.batch(search.task) if stage in strategy.stages else None
    return sys.maxsize if configurations is None else configurations * len(search.variant.seeds(stage))


def contention(load: float, processes: int, cores: int) -> float:
    """The factor by which our processes take longer because they share the cores with other programs."""
    return max(1.0, (load + processes) / cores)


def _memory(prepared: PreparedStudy, capacity: Capacity) -> int:
    """Memory of all processes, with the features in the driver, the object store and the hosts, and with all lanes."""
    feature_bytes = {
        p.data.fingerprint: (0 if isinstance(p.data.x_train, StoredRows) else p.data.x_train.nbytes)
        + p.data.x_test.nbytes
        for p in prepared.problems.values()
    }
    largest = max(problem.data.x_train.nbytes for problem in prepared.problems.values())
    processes = (2 + capacity.federations * (capacity.size.hosts + 2)) * PROCESS_BYTES
    lanes = lanes_bytes(capacity, prepared.most_weights)
    return processes + 2 * sum(feature_bytes.values()) + capacity.federations * largest + lanes
