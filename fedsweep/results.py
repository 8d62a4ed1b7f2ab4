"""The results of a study as pandas data frames.

Stability: public. Properties of `Results` are stable; data frames may gain columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from orchestrator.results import frames
from orchestrator.results import status as standing
from orchestrator.results import winners as tables
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import results_location
from orchestrator.study.study import Study


class Results:
    """A results folder. Every property is read again on access, because a sweep may be running."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)
        self.status  # noqa: B018  raise now if the folder has no results

    def __repr__(self) -> str:
        status = self.status
        state = "finished" if status["finished"] else "not finished"
        return f"<fedsweep.Results of {status['study']} in {self.folder}: {state}>"

    @property
    def study(self) -> Study:
        """The study as it was last run."""
        with results_location(self.folder).open_for_reading() as folder, Ledger.read(folder) as ledger:
            return tables.Results.read(ledger).study

    @property
    def status(self) -> dict[str, Any]:
        """Progress, as printed by `fedsweep status --json`."""
        return standing.read(self.folder)

    @property
    def finished(self) -> bool:
        """Whether all cells have ended."""
        return bool(self.status["finished"])

    @property
    def trials(self) -> pd.DataFrame:
        """One row per finished trial: cell, stage, seed, hyperparameters, state, scores and privacy account."""
        with results_location(self.folder).open_for_reading() as folder, Ledger.read(folder) as ledger:
            return frames.trials(ledger, tables.Results.read(ledger))

    @property
    def configurations(self) -> pd.DataFrame:
        """One row per configuration and stage: number of finished seeds, mean and standard deviation of the scores."""
        with results_location(self.folder).open_for_reading() as folder, Ledger.read(folder) as ledger:
            return frames.configurations(frames.trials(ledger, tables.Results.read(ledger)))

    @property
    def rounds(self) -> pd.DataFrame:
        """One row per trial and evaluated round, one column per metric."""
        with results_location(self.folder).open_for_reading() as folder, Ledger.read(folder) as ledger:
            return frames.rounds(ledger, tables.Results.read(ledger))

    @property
    def cells(self) -> pd.DataFrame:
        """One row per cell: search, test score over the seeds (mean, sample standard deviation), actual eps."""
        with results_location(self.folder).open_for_reading() as folder, Ledger.read(folder) as ledger:
            return frames.cells(tables.Results.read(ledger))

    @property
    def winners(self) -> pd.DataFrame:
        """One row per cell with a winner: its hyperparameters."""
        with results_location(self.folder).open_for_reading() as folder, Ledger.read(folder) as ledger:
            return frames.winners(tables.Results.read(ledger))


def load_results(folder: str | Path) -> Results:
    """Open the results in a folder or at a URL, finished or not; raises `UserError` if there are none."""
    return Results(folder)
