"""The results of a study as pandas data frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from orchestrator.results import frames
from orchestrator.results import status as standing
from orchestrator.results import winners as tables
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import results_location
from orchestrator.study.settings import Study


class Results:
    """A result folder. The frames are read when they are asked for, anew each time: a sweep may be running."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)
        self.status  # noqa: B018  a folder without results is refused here, not at the first look

    def __repr__(self) -> str:
        status = self.status
        state = "finished" if status["finished"] else "not finished"
        return f"<fedsweep.Results of {status['study']} in {self.folder}: {state}>"

    @property
    def study(self) -> Study:
        """The study as last run."""
        with results_location(self.folder).open_for_reading() as folder, Ledger.read(folder) as ledger:
            return tables.Results.read(ledger).study

    @property
    def status(self) -> dict[str, Any]:
        """How far it has come, as `fedsweep status --json` says it."""
        return standing.read(self.folder)

    @property
    def finished(self) -> bool:
        return bool(self.status["finished"])

    @property
    def trials(self) -> pd.DataFrame:
        """Every trial that has ended: its cell, stage, seed, hyperparameters, state, scores and privacy account."""
        with results_location(self.folder).open_for_reading() as folder, Ledger.read(folder) as ledger:
            return frames.trials(ledger, tables.Results.read(ledger))

    @property
    def configurations(self) -> pd.DataFrame:
        """The same by everything except the seed: how many seeds ended, and the mean and spread of their scores."""
        with results_location(self.folder).open_for_reading() as folder, Ledger.read(folder) as ledger:
            return frames.configurations(frames.trials(ledger, tables.Results.read(ledger)))

    @property
    def rounds(self) -> pd.DataFrame:
        """Every trial round by round, a column a metric."""
        with results_location(self.folder).open_for_reading() as folder, Ledger.read(folder) as ledger:
            return frames.rounds(ledger, tables.Results.read(ledger))

    @property
    def cells(self) -> pd.DataFrame:
        """Every cell: its search, its test score over the seeds (mean, sample standard deviation), the actual eps."""
        with results_location(self.folder).open_for_reading() as folder, Ledger.read(folder) as ledger:
            return frames.cells(tables.Results.read(ledger))

    @property
    def winners(self) -> pd.DataFrame:
        """The chosen hyperparameters of every cell that has a winner."""
        with results_location(self.folder).open_for_reading() as folder, Ledger.read(folder) as ledger:
            return frames.winners(tables.Results.read(ledger))


def load_results(folder: str | Path) -> Results:
    """The results in a folder or at a URL, finished or not; `UserError` where there are none."""
    return Results(folder)
