"""The results of a study as pandas data frames.

Stability: public. Properties of `Results` are stable; data frames may gain columns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from orchestrator.results import frames
from orchestrator.results import status as progress
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import results_location
from orchestrator.results.winners import Results as LedgerResults
from orchestrator.study.study import Study

T = TypeVar("T")


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
        return self._read(lambda ledger, results: results.study)

    @property
    def status(self) -> dict[str, Any]:
        """Progress, as printed by `fedsweep status --json`."""
        return progress.read(self.folder)

    @property
    def finished(self) -> bool:
        """Whether all cells have ended."""
        return bool(self.status["finished"])

    @property
    def trials(self) -> pd.DataFrame:
        """One row per stage and ended trial: cell, stage, seed, hyperparameters, state, scores, privacy account."""
        return self._read(frames.trials)

    @property
    def configurations(self) -> pd.DataFrame:
        """One row per configuration and stage: number of seeds, number of trials that are done, mean and std of the
        scores."""
        return frames.configurations(self.trials)

    @property
    def rounds(self) -> pd.DataFrame:
        """One row per stage, ended trial and evaluated round; one column per metric."""
        return self._read(frames.rounds)

    @property
    def cells(self) -> pd.DataFrame:
        """One row per cell and search variant: test score (mean, sample standard deviation over seeds), actual eps."""
        return self._read(lambda ledger, results: frames.cells(results))

    @property
    def winners(self) -> pd.DataFrame:
        """One row per cell and search variant with a winner: its hyperparameters."""
        return self._read(lambda ledger, results: frames.winners(results))

    def _read(self, query: Callable[[Ledger, LedgerResults], T]) -> T:
        with results_location(self.folder).open_for_reading() as folder, Ledger.read(folder) as ledger:
            return query(ledger, LedgerResults.read(ledger))


def load_results(folder: str | Path) -> Results:
    """Open the results in a folder or at a URL, finished or not; raises `UserError` if there are none."""
    return Results(folder)
