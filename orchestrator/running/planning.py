"""What a study would run, and about how long that would take here. Starts no actor."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from orchestrator.running.cluster import local_resources
from orchestrator.running.packing import Capacity, capacity, make_packs, passes
from orchestrator.running.progress import expected_trials
from orchestrator.search.cell_search import CellSearch
from orchestrator.study.cells import Blueprint
from orchestrator.study.settings import Study
from orchestrator.study.ways import STAGES
from trainables.models import kernels
from trainables.spec import TrialSpec

# of a core's rate for matrix products, what a trial-round reaches, compiled or not (fedsweep bench measures it)
GEMM_SHARE = {"compiled": 0.6, "torch": 0.4}
START_S = 12
PROCESS_BYTES = 350 << 20  # a Python process with torch in it


@dataclass(frozen=True)
class Plan:
    study: str
    cells: int
    ways: int
    """How many ways every cell is searched in."""
    trials: dict[str, int]
    """By stage, without those that another cell or stage runs too."""
    packs: dict[str, int]
    trial_rounds: int
    seconds: float
    bytes: int
    federations: int
    hosts: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        minutes = self.seconds / 60
        stages = ", ".join(f"{count} {stage}" for stage, count in self.trials.items())
        packs = ", ".join(f"{count} {stage}" for stage, count in self.packs.items())
        return "\n".join(
            [
                f"study {self.study}: {self.cells} cells"
                + (f", each searched in {self.ways} ways" if self.ways > 1 else ""),
                f"trials: {sum(self.trials.values())} ({stages})",
                f"packs: {sum(self.packs.values())} ({packs})",
                f"trial-rounds: {self.trial_rounds}",
                f"on this machine: {self.federations} federation(s) of {self.hosts} client host(s), about "
                + (f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h")
                + f" and {self.bytes / 2**30:.1f} GiB of memory",
            ]
        )


def plan(study: Study) -> Plan:
    blueprint = Blueprint.draw(study)
    size = capacity(local_resources(), study.resources, blueprint.most_clients)
    searches = [
        CellSearch(cell, way, blueprint.validation_rows(cell)) for cell in blueprint.cells for way in study.ways
    ]
    trials: Counter[str] = Counter()
    packs: Counter[str] = Counter()
    known: set[str] = set()
    rounds = 0
    flops = 0.0
    for stage in STAGES:
        found = _unique([trial for search in searches for trial in _stage_trials(search, stage)])
        members = [trial for trial in found if trial.key not in known]
        known.update(trial.key for trial in members)
        if not members:
            continue
        trials[stage] = len(members)
        packs[stage] = len(make_packs(members, size))
        for trial in members:
            rounds += trial.rounds
            problem = blueprint.problems[trial.problem.key]
            flops += 4.0 * sum(problem.partition.sizes) * problem.model.dimension * trial.rounds * passes(trial)
    cores = size.federations * size.size.hosts
    seconds = START_S + flops / (_gemm_rate() * GEMM_SHARE[kernels.chosen()] * cores)
    return Plan(
        study.name,
        len(blueprint.cells),
        len(study.ways),
        dict(trials),
        dict(packs),
        rounds,
        seconds,
        _memory(blueprint, size),
        size.federations,
        size.size.hosts,
    )


def _stage_trials(search: CellSearch, stage: str) -> list[TrialSpec]:
    """Trials of a stage as they will be, where that depends on nothing; else as many stand-ins."""
    space, cell = search.cell.space, search.cell
    count = expected_trials(search).get(stage, 0)
    if not count:
        return []
    seeds = cell.study.seeds_of(search.way, stage)
    if stage == "coarse" or (stage == "fine" and cell.study.search.refine == "table"):
        grid = space.grid(space.coarse if stage == "coarse" else space.fine)
        return [cell.trial(stage, configuration, seed) for configuration in grid for seed in seeds]
    stand_ins = [cell.trial(stage, space.grid(space.coarse)[0], seed) for seed in seeds]
    return [
        stand_ins[n % len(seeds)].model_copy(update={"stop_rule": f"{cell.id} {search.way.name} {n}"})
        for n in range(count)
    ]


def _unique(trials: list[TrialSpec]) -> list[TrialSpec]:
    return list({trial.key: trial for trial in trials}.values())


def _gemm_rate() -> float:
    """Floating-point operations a second of one core, in products like ours. Takes a tenth of a second."""
    x, w = torch.rand(1024, 65), torch.rand(65, 160)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.mm(x, w)
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < 0.1:
            torch.mm(x, w)
            count += 1
        return count * 2.0 * x.numel() * w.shape[1] / (time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)


def _memory(blueprint: Blueprint, size: Capacity) -> int:
    """All processes together: features in the driver, the object store and the hosts; the lanes' weights."""
    data = {p.data.fingerprint: p.data.x_train.nbytes + p.data.x_test.nbytes for p in blueprint.problems.values()}
    largest = max(problem.data.x_train.nbytes for problem in blueprint.problems.values())
    dimension = max(problem.model.dimension for problem in blueprint.problems.values())
    lanes = size.lanes_per_pack * dimension * 8 * 6 * size.size.hosts
    processes = (2 + size.federations * (size.size.hosts + 2)) * PROCESS_BYTES
    return processes + 2 * sum(data.values()) + size.federations * (largest + lanes)
