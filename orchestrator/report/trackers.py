"""Export to MLflow and W&B.

Both tools read files in the current folder, which other people may have written: settings that name the server to which
the user's key is sent, stores of runs, and a git configuration, which can name commands that git executes. So the user
must name MLflow's store, and W&B runs in an empty folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.report.tracked_runs import tracked_runs
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results
from trainables.errors import UserError


def write_mlflow(ledger: Ledger, results: Results, folder: Path) -> list[str]:
    """Add the runs to the store that the user has named. MLflow's default is a store in the current folder."""
    mlflow = _module("mlflow")
    if not mlflow.is_tracking_uri_set():
        raise UserError(
            "MLFLOW_TRACKING_URI is not set: name the MLflow server or store, such as sqlite:////home/me/mlflow.db"
        )
    mlflow.set_experiment(results.study.name)
    exported = mlflow.search_runs(experiment_names=[results.study.name], output_format="list")
    known = {tuple(run.data.tags.get(name) for name in ("cell", "search", "stage", "key", "state")) for run in exported}
    count = 0
    for run in tracked_runs(ledger, results):
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


def write_wandb(ledger: Ledger, results: Results, folder: Path) -> list[str]:
    """W&B keeps its files and offline runs in WANDB_DIR, or in a new folder inside `folder`."""
    runs, chosen = list(tracked_runs(ledger, results)), os.environ.get("WANDB_DIR")
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(chosen).absolute() if chosen else Path(tempfile.mkdtemp(prefix="runs-", dir=folder)).absolute()
    with _in_empty_folder():
        wandb = _module("wandb")
        settings = wandb.Settings(root_dir=str(root), disable_git=True, disable_code=True, save_code=False)
        for run in runs:
            config = {**run.hyperparameters, **run.account, "seed": run.line["seed"], "cell": run.cell}
            names = {"project": results.study.name, "group": _short(run.group), "job_type": run.stage, "name": run.name}
            names["id"] = run.id
            with wandb.init(**names, config=config, resume="allow", settings=settings) as started:
                for t, values in run.curve:
                    started.log(values, step=t)
    return [f"{len(runs)} runs in the W&B project {results.study.name}; W&B's files are in {root}"]


@contextlib.contextmanager
def _in_empty_folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="fedsweep-") as empty:
        os.chdir(empty)
        try:
            yield
        finally:
            os.chdir(before)


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
