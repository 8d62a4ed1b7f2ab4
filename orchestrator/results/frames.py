"""A ledger as data frames: every trial, every round, every cell. What CSV files and the Python package hand out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from orchestrator.report.tables.common import names
from orchestrator.results.ledger import Ledger, Row
from orchestrator.results.winners import CHUNK, CellResult, Results, actual_epsilon
from orchestrator.study.settings import SECRET
from orchestrator.study.strategies import STAGES

TRIAL = ("setting", "epsilon", "method", "search", "stage", "key", "seed", "state")
"""Which trial a line is about. A trial that belongs to several stages has a line in each."""


def trials(ledger: Ledger, results: Results) -> pd.DataFrame:
    """One line a trial that has ended: what it was, how it ended, what it scored and what its privacy cost."""
    lines = []
    for cell, stage, row in _ended(ledger, results):
        spec = json.loads(row.spec)
        lines.append(
            {
                **_names(cell, stage, row, spec),
                "reason": row.reason,
                "rounds": row.rounds,
                "accuracy": row.accuracy,
                "loss": row.loss,
                "epsilon_claimed": row.epsilon_claimed,
                "epsilon_local": row.epsilon_local,
                "epsilon_secure": row.epsilon_secure,
                "epsilon_unsampled": row.epsilon_unsampled,
                "seconds": row.seconds,
                "clip": spec["privacy"]["clip"],
                **spec["hyperparameters"],
            }
        )
    head = [*TRIAL, "reason", "rounds", "accuracy", "loss", "epsilon_claimed", "epsilon_local", "epsilon_secure"]
    return _frame(lines, [*head, "epsilon_unsampled", "seconds", "clip"])


OF_ONE_RUN = {"key", "seed", "state", "reason", "rounds", "accuracy", "loss", "seconds"}
"""Columns of `trials` that seeds may differ in; the accounts of equal configurations are equal."""


def configurations(of_trials: pd.DataFrame) -> pd.DataFrame:
    """Trials by everything except the seed."""
    same = [name for name in map(str, of_trials) if name not in OF_ONE_RUN and not name.startswith("epsilon_")]
    found = of_trials.groupby(same, dropna=False, sort=False)
    told = found.agg(
        seeds=("seed", "nunique"),
        done=("state", lambda states: int((states == "done").sum())),
        accuracy=("accuracy", "mean"),
        accuracy_std=("accuracy", "std"),
        loss=("loss", "mean"),
        loss_std=("loss", "std"),
    )
    return told.reset_index()


def rounds(ledger: Ledger, results: Results, stage: str | None = None) -> pd.DataFrame:
    """One line a trial and evaluated round, a column a metric; of one stage, or of all."""
    lines = []
    for cell, name, row in _ended(ledger, results, stage):
        here = _names(cell, name, row, json.loads(row.spec))
        for t in sorted({t for by_round in row.metrics.values() for t in by_round}):
            measured = {metric: by_round[t] for metric, by_round in row.metrics.items() if t in by_round}
            lines.append({**here, "round": t, **measured})
    return _frame(lines, [*TRIAL, "round"])


def seeds(ledger: Ledger, results: Results) -> pd.DataFrame:
    """Every confirm run round by round: what means and deviations in the tables are made of."""
    return rounds(ledger, results, "confirm")


def cells(results: Results) -> pd.DataFrame:
    """One line a cell: what its search came to, and the test score after the last round."""
    lines = []
    for cell in results.cells:
        final = cell.curve.get(cell.last)
        rows = cell.confirm.values()
        lines.append(
            {
                **names(cell),
                "cell": cell.id,
                "trials": cell.search.trials,
                "missing": cell.missing,
                f"validation_{cell.objective.metric}": cell.search.choice.score if cell.search.choice else math.nan,
                f"test_{cell.objective.metric}": final.mean if final else math.nan,
                "std": final.std if final else math.nan,
                "seeds": final.seeds if final else 0,
                "epsilon_actual": max((actual_epsilon(row) for row in rows), default=math.nan),
            }
        )
    return pd.DataFrame(lines)


def winners(results: Results) -> pd.DataFrame:
    """One line a cell that has a winner: its hyperparameters."""
    lines = [
        {**names(cell), "cell": cell.id, **cell.search.chosen}
        for cell in results.cells
        if cell.search.chosen is not None
    ]
    return _frame(lines, ["setting", "epsilon", "method", "search", "cell"])


def _ended(ledger: Ledger, results: Results, only: str | None = None) -> Iterator[tuple[CellResult, str, Row]]:
    """In the order of the tables, then of the grids; of a private search the winners alone."""
    stages = ledger.stages()
    for cell in results.cells:
        if results.study.private:
            yield from ((cell, "confirm", row) for row in cell.confirm.values() if only in (None, "confirm"))
            continue
        name = f"{cell.setting} / {cell.method.shown} / eps {cell.epsilon:g}"
        for stage in STAGES if only is None else (only,):
            keys = stages.get((name, cell.strategy, stage), [])
            for start in range(0, len(keys), CHUNK):
                for row in ledger.rows(keys[start : start + CHUNK]).values():
                    yield cell, stage, row


def _names(cell: CellResult, stage: str, row: Row, spec: dict[str, Any]) -> dict[str, Any]:
    seed = None if spec["seed"] == SECRET else spec["seed"]
    return {**names(cell), "stage": stage, "key": row.key, "seed": seed, "state": row.state}


def _frame(lines: list[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    """Known columns first, then hyperparameters and metrics in the order in which they turned up."""
    more = dict.fromkeys(name for line in lines for name in line if name not in columns)
    return pd.DataFrame(lines, columns=[*columns, *more])
