"""The commands that are suggested after a data file was written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from orchestrator.console import stderr


def show_training(file: Path) -> None:
    name = file.stem if re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]{0,63}", file.stem) else "mine"
    study = f"{{name: {name}, data: [{file}], methods: [dp-fedgd, dp-fedsofim], epsilons: [3]}}"
    stderr.print(
        f"to tune methods for your data, save this line as {name}.yaml and run fedsweep run {name}.yaml:\n{study}",
        soft_wrap=True,
    )
    command = f"fedsweep train --data {shlex.quote(str(file))} --epsilon 3 --save model.npz"
    stderr.print(f"to train one model without tuning: {command}")
