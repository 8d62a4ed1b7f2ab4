"""Computes dense tables: every configuration of a grid at every budget with several seeds, on the validation rows.

python -m benchmarks.dense --data FOLDER --into FOLDER [--tables NAME ...] [--device cuda] [--seconds S]

FOLDER of --data has the feature files and the dense tables that exist. A table that does not exist is written as
dense-NAME.csv.gz. For every table, rungs-NAME.csv.gz has the accuracies after the first rounds, which a replay of
successive halving needs. Files that exist are not computed again.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.replay import ROUNDS, RUNGS
from orchestrator.execution.packing import AUTO_LANES, Capacity, make_packs
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.study import Study
from trainables.federation.federation_size import FederationSize
from trainables.federation.lane_result import LaneResult
from trainables.federation.problem import ProblemData
from trainables.federation.server import run_pack
from trainables.federation.trial_spec import TrialSpec

SEVEN = (0.5, 0.8, 1.3, 2.0, 3.2, 5.0, 8.0)
ELEVEN = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.2)
THIRTEEN = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.2, 16.0)
RHO = (0.01, 0.04642, 0.21544, 1.0, 4.64159, 21.54435, 100.0)


def _geometric(low: float, high: float, count: int) -> tuple[float, ...]:
    return tuple(round(low * (high / low) ** (n / (count - 1)), 5) for n in range(count))


@dataclass(frozen=True)
class Grid:
    """The method, data, configurations, budgets and number of seeds of a table."""

    method: str
    data: str
    axes: Mapping[str, Sequence[float]]
    epsilons: Sequence[float]
    seeds: int
    fixed: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the method in the study file."""


_SOFIM3 = {"learning_rate": _geometric(10**-1.5, 10**1.5, 10), "rho": RHO, "beta": (0.0, 0.5, 0.8, 0.9, 0.97)}
TABLES = {
    "fedgd-centred-cifar10": Grid(
        "dp-fedgd",
        "cifar10-resnet20.npz",
        {"learning_rate": _geometric(0.01, 10**1.5, 28)},
        THIRTEEN,
        16,
        settings={"preprocess": {"center": 0.02, "bound": 16}, "aggregate": "size", "clip": 4},
    ),
    "fedsofim-cifar10": Grid(
        "dp-fedsofim",
        "cifar10-resnet20.npz",
        {"learning_rate": _geometric(10**-1.5, 10**1.5, 12), "rho": _geometric(0.01, 100, 8)},
        THIRTEEN,
        10,
        {"beta": 0.9},
    ),
    "fedsofim3-cifar10": Grid("dp-fedsofim", "cifar10-resnet20.npz", _SOFIM3, ELEVEN, 6),
    "fedadam4-cifar10": Grid(
        "dp-fedadam",
        "cifar10-resnet20.npz",
        {
            "learning_rate": _geometric(10**-2.5, 10, 10),
            "beta1": (0.0, 0.5, 0.9, 0.97),
            "beta2": (0.8, 0.9, 0.999),
            "tau": (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
        },
        ELEVEN,
        6,
    ),
    "fedsofim3-crc5": Grid("dp-fedsofim", "crc5-resnet20.npz", _SOFIM3, ELEVEN, 20),
    "fedsofim3-constant-crc5": Grid(  # bias correction and warm-up do not depend on eps
        "dp-fedsofim", "crc5-resnet20.npz", _SOFIM3, ELEVEN, 20, {"bias_correction": True, "warmup_rounds": 0}
    ),
    "fedavg3-crc5": Grid(
        "dp-fedavg",
        "crc5-resnet20.npz",
        {
            "server_learning_rate": _geometric(0.01, 10, 8),
            "client_learning_rate": (0.01, 0.03, 0.1, 0.3, 1.0),
            "local_steps": (1, 3, 5, 10, 20),
        },
        SEVEN,
        8,
    ),
}


def study_of(grid: Grid, data: Path) -> Study:
    axes = {name: list(values) for name, values in grid.axes.items()}
    method = {"name": grid.method, "fixed": dict(grid.fixed), "coarse": axes, "fine": axes, **grid.settings}
    return Study.model_validate(
        {
            "name": "dense",
            "data": [str(data / grid.data)],
            "partitions": ["dirichlet:0.5"],
            "clients": 20,
            "methods": [method],
            "defaults": "paper",
            "epsilons": list(grid.epsilons),
            "rounds": dict.fromkeys(("coarse", "fine", "confirm"), ROUNDS),
            "evaluate_every": RUNGS[0],
            "seeds": {"search": list(range(1, grid.seeds + 1)), "contest": [], "confirm": [42]},
        }
    )


def trials_of(grid: Grid, prepared: PreparedStudy) -> Iterator[tuple[dict[str, Any], TrialSpec]]:
    """All trials of a table, with the columns that identify them."""
    seeds = range(1, grid.seeds + 1)
    for cell in prepared.cells:
        for values in itertools.product(*grid.axes.values()):
            axes = dict(zip(grid.axes, values, strict=True))
            for trial in cell.trials({**cell.space.fixed, **axes}, seeds, ROUNDS):
                columns = {"epsilon": cell.epsilon, "method": cell.method.shown, "stage": "coarse", "seed": trial.seed}
                yield {**columns, **axes}, trial


def compute(grid: Grid, data: Path, device: str, deadline: float) -> pd.DataFrame | None:
    """The table with the accuracies after the rungs; None if the deadline passes first."""
    prepared = PreparedStudy.prepare(study_of(grid, data))
    columns = {trial.key: (column, trial) for column, trial in trials_of(grid, prepared)}
    data_of = cache(lambda key: ProblemData.of(prepared.problems[key]))
    size = FederationSize(1, 1.0, float(device == "cuda"))
    lines = []
    for pack in make_packs([trial for _, trial in columns.values()], Capacity(size, 1, AUTO_LANES[device])):
        if time.time() > deadline:
            return None
        for key, lane in run_pack(pack, data_of(pack[0].problem.key), device=device).items():
            lines.append({**columns[key][0], **_scores(lane)})
    order = ["epsilon", *grid.axes, "seed"]
    return pd.DataFrame(lines).sort_values(order, ignore_index=True)


def _scores(lane: LaneResult) -> dict[str, Any]:
    """A trial that diverged has no score, neither at the end nor before."""
    done = lane.state == "done"
    scores = {name: lane.metrics[name].get(ROUNDS) if done else None for name in ("accuracy", "loss")}
    early = {f"accuracy_{rung}": lane.metrics["accuracy"].get(rung) if done else None for rung in RUNGS}
    return {"state": lane.state, "rounds": lane.rounds, **scores, **early}


def write(name: str, data: Path, into: Path, device: str, deadline: float) -> bool:
    """Compute a table and write its missing files; return whether all of them exist."""
    rungs, dense = into / f"rungs-{name}.csv.gz", into / f"dense-{name}.csv.gz"
    given = data / dense.name
    if rungs.exists() and (given.exists() or dense.exists()):
        return True
    start = time.time()
    table = compute(TABLES[name], data, device, deadline)
    if table is None:
        return False
    early = [f"accuracy_{rung}" for rung in RUNGS]
    identity = ["epsilon", "seed", *TABLES[name].axes]
    for file, own in ((dense, table.drop(columns=early)), (rungs, table[[*identity, "accuracy", *early]])):
        if file is rungs or not given.exists():
            partial = file.with_name(f"partial-{file.name}")
            own.to_csv(partial, index=False, float_format="%.10g", compression={"method": "gzip", "mtime": 0})
            partial.replace(file)
    print(f"{name}: {len(table)} trials, {time.time() - start:.0f} s{_compared(table, given, identity)}", flush=True)
    return True


def _compared(table: pd.DataFrame, given: Path, identity: list[str]) -> str:
    """How the accuracies differ from those of the existing table `given`, as text."""
    if not given.exists():
        return ""
    other = pd.read_csv(given)
    other = other[other["stage"] == "coarse"]
    both = table.round(dict.fromkeys(identity, 6)).merge(other.round(dict.fromkeys(identity, 6)), on=identity)
    apart = (both["accuracy_x"] - both["accuracy_y"]).abs()
    return (
        f"; {len(both)} of {len(other)} in {given.name}, differences: mean {apart.mean():.3f}, most {apart.max():.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further pack after this time")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    deadline = time.time() + options.seconds
    for name in options.tables:
        if not write(name, options.data, options.into, options.device, deadline):
            print(f"{name}: not finished in time", flush=True)


if __name__ == "__main__":
    main()
