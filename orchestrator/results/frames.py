"""A ledger as data frames: trials, rounds, cells. The source of the CSV files and of the Python API."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from orchestrator.results.ledger import Ledger, Row
from orchestrator.results.searches import SearchedCell
from orchestrator.results.trial_columns import CHUNK
from orchestrator.results.winners import CellResult, Results, actual_epsilon
from orchestrator.search.variant import SECRET
from trainables.metrics import METRICS

NAMES = ("setting", "epsilon", "method", "search")
"""Columns that identify a cell and its search variant."""
TRIAL = ("setting", "epsilon", "method", "search", "stage", "key", "seed", "state")
"""Columns that identify a trial. A trial that belongs to several stages has one row for each."""
OF_ROW = (
    *("reason", "rounds", "accuracy", "loss"),
    *("epsilon_claimed", "epsilon_local", "epsilon_secure", "epsilon_unsampled", "seconds"),
)
"""Columns that are fields of `Row`."""
TRIAL_COLUMNS = (*TRIAL, *OF_ROW, "clip")
"""The first columns of `trials`; metrics and hyperparameters follow."""


def names(cell: SearchedCell) -> dict[str, str | float]:
    values = (cell.setting, cell.epsilon, cell.method.shown, cell.variant.name)
    return dict(zip(NAMES, values, strict=True))


def trials(ledger: Ledger, results: Results) -> pd.DataFrame:
    """One row per stage and ended trial: its configuration, state, scores and privacy account."""
    metrics = results.study.trial_metrics
    lines = [
        {
            **_names(cell, stage, row, row.content),
            **{name: getattr(row, name) for name in OF_ROW},
            "clip": row.content["privacy"]["clip"],
            **{name: row.metrics.get(name, {}).get(row.rounds) for name in metrics},
            **row.content["hyperparameters"],
        }
        for cell, stage, row in _ended(ledger, results, whole=bool(metrics))
    ]
    return _frame(lines, list(TRIAL_COLUMNS))


OF_ONE_RUN = {"key", "seed", "state", "reason", "rounds", "accuracy", "loss", "seconds", *METRICS}
"""Columns of `trials` that differ between seeds."""


def configurations(of_trials: pd.DataFrame) -> pd.DataFrame:
    """One row per configuration and stage: number of seeds, number of trials that are done, and mean and sample
    standard deviation of the metrics."""
    same = [name for name in map(str, of_trials) if name not in OF_ONE_RUN and not name.startswith("epsilon_")]
    found = of_trials.groupby(same, dropna=False, sort=False)
    measured = [name for name in map(str, of_trials) if name in METRICS]
    summary = found.agg(
        seeds=("seed", "nunique"),
        done=("state", lambda states: int((states == "done").sum())),
        **{name: (name, "mean") for name in measured},
        **{f"{name}_std": (name, "std") for name in measured},
    )
    return summary.reset_index()


def rounds(ledger: Ledger, results: Results, stage: str | None = None) -> pd.DataFrame:
    """One row per stage, ended trial and evaluated round; one column per metric. `stage`: None for all stages."""
    lines = []
    for cell, name, row in _ended(ledger, results, stage):
        here = _names(cell, name, row, row.content)
        for t in sorted({t for by_round in row.metrics.values() for t in by_round}):
            measured = {metric: by_round[t] for metric, by_round in row.metrics.items() if t in by_round}
            lines.append({**here, "round": t, **measured})
    return _frame(lines, [*TRIAL, "round"])


def cells(results: Results) -> pd.DataFrame:
    """One row per cell and search variant: the search, and the test score after the last round."""
    lines = []
    for cell in results.cells:
        final = cell.curve.get(cell.last)
        rows = cell.confirm.values()
        lines.append(
            {
                **names(cell),
                "cell": cell.name,
                "trials": cell.search.trials,
                "missing": cell.search.missing,
                f"validation_{cell.objective.metric}": cell.search.choice.score if cell.search.choice else math.nan,
                f"test_{cell.objective.metric}": final.mean if final else math.nan,
                "std": final.std if final else math.nan,
                "seeds": final.seeds if final else 0,
                "epsilon_actual": max((actual_epsilon(row) for row in rows), default=math.nan),
            }
        )
    return pd.DataFrame(lines)


def winners(results: Results) -> pd.DataFrame:
    """One row per cell and search variant with a winner: its hyperparameters."""
    lines = [
        {
            **names(cell),
            "cell": cell.name,
            "clip": cell.method.clip or results.study.privacy.clip,
            "rounds": cell.last,
            **cell.search.chosen,
        }
        for cell in results.cells
        if cell.search.chosen is not None
    ]
    return _frame(lines, ["setting", "epsilon", "method", "search", "cell"])


def _ended(
    ledger: Ledger, results: Results, only: str | None = None, *, whole: bool = True
) -> Iterator[tuple[CellResult, str, Row]]:
    """Trials that have ended, in the order of the tables, then of the stages; of a private search only the confirm
    runs. `whole=False`: without metrics."""
    for cell in results.cells:
        if results.study.private:
            yield from ((cell, "confirm", row) for row in cell.confirm.values() if only in (None, "confirm"))
            continue
        for stage in cell.stages if only is None else (only,):
            keys = cell.stages.get(stage, [])
            for start in range(0, len(keys), CHUNK):
                for row in ledger.rows(keys[start : start + CHUNK], whole=whole).values():
                    yield cell, stage, row


def _names(cell: CellResult, stage: str, row: Row, spec: dict[str, Any]) -> dict[str, Any]:
    seed = None if spec["seed"] == SECRET else spec["seed"]
    return {**names(cell), "stage": stage, "key": row.key, "seed": seed, "state": row.state}


def _frame(lines: list[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    """Known columns first, then hyperparameters and metrics in the order they appear."""
    more = dict.fromkeys(name for line in lines for name in line if name not in columns)
    return pd.DataFrame(lines, columns=[*columns, *more])
