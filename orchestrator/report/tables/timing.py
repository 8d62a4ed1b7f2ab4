"""Seconds per round. They differ between runs and machines, so they are kept apart from the reproducible tables."""

from __future__ import annotations

import math
from statistics import fmean

import pandas as pd

from orchestrator.report.tables.render import NOTHING, Group, Table
from orchestrator.results.winners import Results


def seconds_per_round(results: Results) -> Table:
    """Form of table 7 of the DP-FedSOFIM paper."""
    groups, records = [], []
    for setting in results.settings:
        rows = []
        for method in results.study.methods:
            cells = [cell for cell in results.of(setting) if cell.method == method]
            confirm = [row.seconds / row.rounds for cell in cells for row in cell.confirm.values() if row.rounds]
            search = [seconds for cell in cells for seconds in cell.search.seconds]
            rows.append([method.shown, _mean(confirm), str(len(confirm)), _mean(search), str(len(search))])
            records.append(
                {
                    **{"setting": setting, "method": method.shown},
                    **{"confirm_seconds": fmean(confirm) if confirm else math.nan, "confirm_trials": len(confirm)},
                    **{"search_seconds": fmean(search) if search else math.nan, "search_trials": len(search)},
                }
            )
        groups.append(Group(setting, rows))
    return Table(
        title="Seconds per round",
        summary="How long a round of one trial takes.",
        caption=(
            "Mean seconds per round of one trial, over all budgets. Trials are computed in packs, and a trial's "
            "seconds are its share of its pack's. They fall as packs grow (confirm packs are small), are less than a "
            "trial takes alone, and depend on the machine."
        ),
        columns=["Method", "Confirm (s)", "Trials", "Search (s)", "Trials"],
        align="lrrrr",
        groups=groups,
        data=pd.DataFrame(records),
    )


def _mean(seconds: list[float]) -> str:
    return f"{fmean(seconds):.3g}" if seconds else NOTHING
