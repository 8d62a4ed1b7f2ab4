"""Reads the specifications of very many trials from JSON.

The text before the hyperparameters, the hyperparameters, and the text after them repeat from trial to trial. Each
distinct part is completed to a JSON object and parsed once. If all parts are valid, their members together are those of
the specification.
"""

from __future__ import annotations

import json
import re
import sqlite3
from functools import lru_cache
from typing import Any

HYPERPARAMETERS, AFTER = '"hyperparameters":', ',"privacy":'  # as `TrialSpec` writes them
NAME = re.compile(r"[A-Za-z_]\w{0,99}", re.ASCII)
MOST_PARTS = 20_000
LARGEST = 2**63  # integers must be smaller: they become floats, or int64 in Arrow


def read_parts(text: str) -> dict[str, Any] | None:
    """The specification; None if the text has another form."""
    start = text.find(HYPERPARAMETERS)
    end = text.find(AFTER, start)
    if start < 0 or end < 0:
        return None
    values = start + len(HYPERPARAMETERS)
    before, chosen, after = _before(text[:start]), _hyperparameters(text[values:end]), _after(text[end:])
    if before is None or chosen is None or after is None or "hyperparameters" in after:
        return None
    return {**before, "hyperparameters": chosen, **after}


def check_hyperparameters(chosen: dict[str, Any]) -> None:
    for name, value in chosen.items():
        kind = type(value)
        scalar = kind is float or (kind is int and abs(value) < LARGEST) or kind is bool or value is None
        if not (scalar or (kind is str and value.isprintable())) or not NAME.fullmatch(name):
            raise sqlite3.DataError(f"{ {name: value}!r:.50} is not a hyperparameter")


@lru_cache(maxsize=MOST_PARTS)
def _hyperparameters(text: str) -> dict[str, Any] | None:
    """Parsed and checked."""
    found = _part(text)
    if found is not None:
        check_hyperparameters(found)
    return found


@lru_cache(maxsize=MOST_PARTS)
def _before(text: str) -> dict[str, Any] | None:
    return _part(text + '"":0}')


@lru_cache(maxsize=MOST_PARTS)
def _after(text: str) -> dict[str, Any] | None:
    return _part('{"":0' + text)


def _part(text: str) -> dict[str, Any] | None:
    """Parse a JSON object, and remove the placeholder "" that completed the text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    found.pop("", None)
    return found
