"""What to do with a new data file."""

from __future__ import annotations

import shlex
from pathlib import Path

from orchestrator.console import stderr


def show_training(file: Path) -> None:
    study = f"{{name: mine, data: [{file}], methods: [dp-fedgd, dp-fedsofim], epsilons: [3]}}"
    stderr.print(f"a study for fedsweep run, which tunes methods for your data: {study}", soft_wrap=True)
    command = f"fedsweep train --data {shlex.quote(str(file))} --epsilon 3 --save model.npz"
    stderr.print(f"to train one model without tuning: {command}")
