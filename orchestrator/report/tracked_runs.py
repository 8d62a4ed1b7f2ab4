"""Trials as experiment trackers record them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from orchestrator.results import frames
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results


class TrackedRun:
    """A trial as trackers record it. `line`: its row of `frames.trials`; `curve`: its rows of `frames.rounds`."""

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
    def id(self) -> str:
        """Differs between cells and search variants that share a trial."""
        place = hashlib.sha256(f"{self.cell} / {self.line['search']}".encode()).hexdigest()[:8]
        return f"{self.stage}-{self.key}-{place}"

    @property
    def group(self) -> str:
        """Cell, stage and hyperparameters: everything except the seed."""
        values = ", ".join(f"{name}={value}" for name, value in self.hyperparameters.items())
        return f"{self.cell} / {self.stage} / {values}"


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def tracked_runs(ledger: Ledger, results: Results) -> Iterator[TrackedRun]:
    place = [*frames.NAMES, "stage", "key"]
    curves = dict(iter(frames.rounds(ledger, results).groupby(place, sort=False)))
    for line in frames.trials(ledger, results).to_dict("records"):
        curve = curves.get(tuple(line[name] for name in place), pd.DataFrame(columns=[*frames.TRIAL, "round"]))
        yield TrackedRun(results, {str(name): value for name, value in line.items()}, curve)
