"""What to do with a new data file."""

from __future__ import annotations

import shlex
from pathlib import Path

from orchestrator.console import stderr


def data_options(file: Path, own_clients: bool) -> str:
    """The options that name a data file, with the clients in it if there are any."""
    return f"--data {shlex.quote(str(file))}{' --partition explicit --clients auto' if own_clients else ''}"


def show_training(file: Path, own_clients: bool) -> None:
    keys = "partitions: [explicit], clients: auto" if own_clients else "clients: 20"
    stderr.print(f"in a study, which tunes the methods for your data: data: [{file}], {keys}")
    command = f"fedsweep train {data_options(file, own_clients)} --epsilon 3 --save model.npz"
    stderr.print(f"to train one model without tuning: {command}")
