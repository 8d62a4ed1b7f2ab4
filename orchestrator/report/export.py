"""Exports for other tools, from the ledger alone, at any time during or after a sweep."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from orchestrator.report.optuna_export import write_optuna
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
        known = (*frames.TRIAL, *frames.OF_ONE_RUN)
        self.cell = " / ".join([line["setting"], line["method"], f"eps {line['epsilon']:g}"])
        self.stage, self.key, self.line = line["stage"], line["key"], line
        self.name = f"{self.stage}-{self.key[:10]}"
        self.study = results.study.name
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


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


_WRITERS: dict[str, Callable[[Ledger, Results, Path], list[str]]] = {
    "csv": _csv,
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
    "optuna": write_optuna,
}
