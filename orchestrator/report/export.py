"""Exports for other tools, from the ledger alone, at any time during or after a sweep."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from orchestrator.report.tables import render
from orchestrator.report.tables.publication import sentences
from orchestrator.results import frames
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results
from trainables.errors import UserError
from trainables.files import subfolder


def export(ledger: Ledger, form: str, folder: Path) -> list[str]:
    """Export the ledger in this form; return where it was written."""
    return _WRITERS[form](ledger, Results.read(ledger), folder)


# ---- tables


def _all_frames(ledger: Ledger, results: Results) -> dict[str, pd.DataFrame]:
    return {
        "trials": frames.trials(ledger, results),
        "rounds": frames.rounds(ledger, results),
        "cells": frames.cells(results),
        "winners": frames.winners(results),
    }


def _csv(ledger: Ledger, results: Results, folder: Path) -> list[str]:
    written = _all_frames(ledger, results).items()
    note = render.write_text(folder / "README.md", " ".join(sentences(results)) + "\n")
    return [str(note)] + [
        str(render.write_text(folder / f"{name}.csv", render.frame_to_csv(frame))) for name, frame in written
    ]


# ---- experiment trackers


class _Run:
    """A trial as trackers record it."""

    def __init__(self, results: Results, line: dict[str, Any], curve: pd.DataFrame) -> None:
        known = ("reason", "rounds", "accuracy", "loss", "seconds", *frames.TRIAL)
        self.cell = " / ".join([line["setting"], line["method"], f"eps {line['epsilon']:g}"])
        self.stage, self.key, self.line = line["stage"], line["key"], line
        self.name = f"{self.stage}-{self.key[:10]}"
        self.study = results.study.name
        variant = next(variant for variant in results.study.variants if variant.name == line["search"])
        rounds = results.study.last_round
        self.was_cut = variant.last_round(self.stage, rounds) < rounds
        self.account = {name: line[name] for name in line if name.startswith("epsilon_")}
        self.hyperparameters = {
            name: value
            for name, value in line.items()
            if name not in known and name not in self.account and not _absent(value)
        }
        measured = [name for name in curve.columns if name not in (*frames.TRIAL, "round")]
        self.curve = [
            (int(point["round"]), {name: float(point[name]) for name in measured if not _absent(point[name])})
            for point in curve.to_dict("records")
        ]

    @property
    def group(self) -> str:
        """Cell, stage and hyperparameters: everything except the seed."""
        values = ", ".join(f"{name}={value}" for name, value in self.hyperparameters.items())
        return f"{self.cell} / {self.stage} / {values}"


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _runs(ledger: Ledger, results: Results) -> Iterator[_Run]:
    curves = dict(iter(frames.rounds(ledger, results).groupby(["search", "stage", "key"], sort=False)))
    for line in frames.trials(ledger, results).to_dict("records"):
        curve = curves.get((line["search"], line["stage"], line["key"]), pd.DataFrame(columns=[*frames.TRIAL, "round"]))
        yield _Run(results, {str(name): value for name, value in line.items()}, curve)


def _tensorboard(ledger: Ledger, results: Results, folder: Path) -> list[str]:
    """One folder per trial in one folder per cell; the files of earlier exports are replaced."""
    from tensorboardX import SummaryWriter

    for run in _runs(ledger, results):
        log_dir = subfolder(folder, render.slug(run.cell), run.name)
        for earlier in log_dir.glob("events.out.tfevents.*"):
            earlier.unlink()
        with SummaryWriter(str(log_dir)) as writer:
            writer.add_text("configuration", ", ".join(f"{k}={v}" for k, v in run.hyperparameters.items()))
            for t, values in run.curve:
                for name, value in values.items():
                    writer.add_scalar(name, value, t)
    return [str(folder)]


def _mlflow(ledger: Ledger, results: Results, folder: Path) -> list[str]:
    mlflow = _module("mlflow")
    mlflow.set_experiment(results.study.name)
    exported = mlflow.search_runs(experiment_names=[results.study.name], output_format="list")
    known = {tuple(run.data.tags.get(name) for name in ("cell", "search", "stage", "key", "state")) for run in exported}
    count = 0
    for run in _runs(ledger, results):
        tags = {"cell": run.cell, "search": run.line["search"], "stage": run.stage, "key": run.key}
        tags |= {"state": run.line["state"], "group": run.group}
        if tuple(tags.values())[:-1] in known:
            continue  # exported before
        with mlflow.start_run(run_name=run.name, tags=tags):
            mlflow.log_params({**run.hyperparameters, "seed": run.line["seed"], "epsilon": run.line["epsilon"]})
            for t, values in run.curve:
                mlflow.log_metrics(_finite(values), step=t)
            mlflow.log_metrics(_finite(run.account))
        count += 1
    return [f"{count} runs added to the MLflow experiment {results.study.name}"]


def _wandb(ledger: Ledger, results: Results, folder: Path) -> list[str]:
    wandb = _module("wandb")
    count = 0
    for run in _runs(ledger, results):
        config = {**run.hyperparameters, **run.account, "seed": run.line["seed"], "cell": run.cell}
        names = {"project": results.study.name, "group": _short(run.group), "job_type": run.stage, "name": run.name}
        with wandb.init(**names, id=f"{run.stage}-{run.key}", config=config, resume="allow") as started:
            for t, values in run.curve:
                started.log(values, step=t)
        count += 1
    return [f"{count} runs in the W&B project {results.study.name}"]


def _short(group: str, most: int = 128) -> str:
    """W&B limits the length of group names; a hash keeps shortened names distinct."""
    return group if len(group) <= most else f"{group[: most - 9]} {hashlib.sha256(group.encode()).hexdigest()[:8]}"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{name} is not installed; pip install 'fedsweep[{name}]'") from None


# ---- Optuna


def _optuna(ledger: Ledger, results: Results, folder: Path) -> list[str]:
    """One Optuna study per cell, for optuna-dashboard: its configurations and their scores."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "optuna.db"
    for ending in ("", "-journal", "-wal", "-shm"):
        Path(f"{file}{ending}").unlink(missing_ok=True)
    storage = f"sqlite:///{file}"
    metric, states = results.study.objective, optuna.trial.TrialState
    directions = optuna.study.StudyDirection
    direction = directions.MINIMIZE if results.study.objective_spec.lower_is_better else directions.MAXIMIZE
    cells: dict[str, list[_Run]] = {}
    for run in _runs(ledger, results):
        first = run.line["search"] == results.study.variants[0].name
        if run.stage != "confirm":
            cells.setdefault(run.cell if first else f"{run.cell} ({run.line['search']})", []).append(run)
    scales = {method.shown: method.space().scale for method in results.study.methods}
    for name, runs in cells.items():
        study = optuna.create_study(study_name=name, storage=storage, direction=direction)
        distributions = _distributions([run.hyperparameters for run in runs], scales[runs[0].line["method"]])
        for run in runs:
            score = run.curve[-1][1].get(metric) if run.curve else None
            done = run.line["state"] == "done" and score is not None
            study.add_trial(
                optuna.trial.create_trial(
                    state=states.FAIL if not done else states.PRUNED if run.was_cut else states.COMPLETE,
                    value=score if done and not run.was_cut else None,
                    params=run.hyperparameters,
                    distributions={name: distributions[name] for name in run.hyperparameters},
                    user_attrs={"stage": run.stage, "key": run.key, "seed": run.line["seed"], **_finite(run.account)},
                    intermediate_values={t: values[metric] for t, values in run.curve if metric in values},
                )
            )
    return [storage]


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _distributions(configurations: list[dict[str, Any]], scales: Mapping[str, str]) -> dict[str, Any]:
    """The range of tried values of every hyperparameter, which Optuna's plots show."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    values: dict[str, dict[Any, None]] = {}
    for configuration in configurations:
        for name, value in configuration.items():
            values.setdefault(name, {})[value] = None
    distributions: dict[str, Any] = {}
    for name, tried in values.items():
        if any(isinstance(value, bool | str) for value in tried):
            distributions[name] = CategoricalDistribution(tuple(tried))
            continue
        low, high = min(tried), max(tried)
        range_of = IntDistribution if all(isinstance(value, int) for value in tried) else FloatDistribution
        distributions[name] = range_of(low, high, log=scales.get(name) == "log" and low > 0)
    return distributions


_WRITERS: dict[str, Callable[[Ledger, Results, Path], list[str]]] = {
    "csv": _csv,
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
    "optuna": _optuna,
}
