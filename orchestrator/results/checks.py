"""Checks of values that are read from a ledger.

A ledger may come from anyone, and SQLite may return any type from any column. Keys and names become parts of paths, and
numbers become sizes. A value that a ledger cannot hold raises sqlite3.DataError, which `Ledger.read` reports.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Sequence
from typing import Any

KEY = re.compile(r"[0-9a-f]{24}")  # as `content_key` computes it
LONGEST_NAME = 100
MOST_ROUNDS = 10**9
STATES = ("done", "diverged", "failed")


def key(value: Any) -> str:
    if not isinstance(value, str) or KEY.fullmatch(value) is None:
        raise _refused(value, "a trial's key")
    return value


def name(value: Any) -> str:
    """The name of a stage or of a search variant."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME or not value.isprintable():
        raise _refused(value, "the name of a stage or a strategy")
    if "/" in value or value.startswith("."):
        raise _refused(value, "the name of a stage or a strategy")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise _refused(value, "text")
    return value


def number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise _refused(value, "a number")
    return value


def rounds(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value <= MOST_ROUNDS:
        raise _refused(value, "a number of rounds")
    return value


def row(values: Sequence[Any]) -> tuple[Any, ...]:
    """The columns of `trials` in their order, with the metrics read from JSON."""
    trial, spec, state, reason, last, accuracy, loss, metrics, *account, seconds, correct = values
    if state not in STATES:
        raise _refused(state, "the state of a trial")
    if not isinstance(correct, bytes):
        raise _refused(correct, "packed bits")
    for score in (accuracy, loss):
        if score is not None:
            number(score)
    parsed = _metrics(text(metrics))
    accounts = [number(epsilon) for epsilon in account]
    return (
        *(key(trial), text(spec), state, text(reason), rounds(last), accuracy, loss, parsed),
        *(*accounts, number(seconds), correct),
    )


def _metrics(content: str) -> dict[str, dict[int, Any]]:
    try:
        by_name = json.loads(content)
        return {
            metric: {rounds(int(t)): value if value is None else number(value) for t, value in by_round.items()}
            for metric, by_round in by_name.items()
        }
    except (ValueError, AttributeError, RecursionError) as error:
        raise sqlite3.DataError(f"metrics cannot be read: {error}") from None


def _refused(value: Any, expected: str) -> sqlite3.DataError:
    return sqlite3.DataError(f"{value!r:.50} is not {expected}")
