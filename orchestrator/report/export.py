"""Exports for other tools, from the ledger alone, at any time during or after a sweep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from orchestrator.report.optuna_export import write_optuna
from orchestrator.report.tables import render
from orchestrator.report.tables.publication import sentences
from orchestrator.report.tracked_runs import tracked_runs
from orchestrator.report.trackers import write_mlflow, write_wandb
from orchestrator.results import frames
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results
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


# ---- TensorBoard


def _tensorboard(ledger: Ledger, results: Results, folder: Path) -> list[str]:
    """One folder per trial in one folder per cell; the files of earlier exports are replaced."""
    from tensorboardX import SummaryWriter

    for run in tracked_runs(ledger, results):
        log_dir = subfolder(folder, render.slug(run.cell), run.name)
        for earlier in log_dir.glob("events.out.tfevents.*"):
            earlier.unlink()
        with SummaryWriter(str(log_dir)) as writer:
            writer.add_text("configuration", ", ".join(f"{k}={v}" for k, v in run.hyperparameters.items()))
            for t, values in run.curve:
                for name, value in values.items():
                    writer.add_scalar(name, value, t)
    return [str(folder)]


_WRITERS: dict[str, Callable[[Ledger, Results, Path], list[str]]] = {
    "csv": _csv,
    "tensorboard": _tensorboard,
    "mlflow": write_mlflow,
    "wandb": write_wandb,
    "optuna": write_optuna,
}
