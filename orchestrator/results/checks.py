"""Checks of values that are read from a ledger.

A ledger may come from anyone, and SQLite may return any type from any column. Keys and names become parts of paths, and
numbers become sizes. An invalid value raises sqlite3.DataError, which `Ledger.read` and `Ledger.write` report.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from orchestrator.results.spec_parts import LARGEST, check_hyperparameters, read_parts

KEY = re.compile(r"[0-9a-f]{24}")  # as `content_key` computes it
KEYS = re.compile(r"[0-9a-f]*")
LONGEST_NAME = 100
MOST_ROUNDS = 10**6  # as in a study
MOST_ROWS = 10**12
MOST_LANES = 10**6
SECRET_BYTES = 32
STATES = ("done", "diverged", "failed")
NOT_METRICS = ("setting", "epsilon", "method", "search", "stage", "key", "seed", "state", "round")
"""Names that a metric must not have: the other columns of the table of trials by round."""


def key(value: Any) -> str:
    if not isinstance(value, str) or KEY.fullmatch(value) is None:
        raise _refused(value, "a trial's key")
    return value


def keys(values: Sequence[Any]) -> list[str]:
    """As `key`, for many values."""
    return list(values) if _are_keys(values) else list(map(key, values))


def _are_keys(values: Sequence[Any]) -> bool:
    if set(map(type, values)) != {str} or set(map(len, values)) != {24}:
        return False
    return KEYS.fullmatch("".join(values)) is not None


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


def line(value: Any) -> str:
    """Text on one line: a terminal would interpret control characters."""
    if text(value).isprintable():
        return value
    return "".join(character if character.isprintable() else " " for character in value)


def lines(value: Any) -> str:
    """Text of several lines, each as `line` returns it."""
    return "\n".join(map(line, text(value).split("\n")))


def content(value: Any) -> Any:
    """A value, read from JSON."""
    try:
        return json.loads(text(value))
    except (ValueError, RecursionError) as error:  # ValueError: also a number of a thousand digits
        raise sqlite3.DataError(f"{value!r:.50} cannot be read: {error}") from None


def names(value: Any) -> list[str]:
    """A list of names, as JSON."""
    return _names(content(value), value)


def names_by_data(value: Any) -> dict[str, tuple[list[str], list[str]]]:
    """The names of classes and of clients by data set, as JSON."""
    match content(value):
        case dict() as found if all(isinstance(each, list) and len(each) == 2 for each in found.values()):
            return {
                line(data): (_names(classes, value), _names(clients, value))
                for data, (classes, clients) in found.items()
            }
    raise _refused(value, "names by data set")


def _names(found: Any, value: Any) -> list[str]:
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise _refused(value, "a list of names")
    return [line(each) for each in found]


def hashes(value: Any) -> dict[str, str]:
    """Hashes of code by the name of its module, as JSON."""
    found = content(value)
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise _refused(value, "a mapping of modules to hashes")
    return {line(module): line(code) for module, code in found.items()}


def secret(value: Any) -> bytes:
    """The secret of a private search. With an empty secret, the noise would be known."""
    if not isinstance(value, bytes) or len(value) != SECRET_BYTES:
        raise sqlite3.DataError(f"the secret of a private search is not {SECRET_BYTES} bytes")  # never shown
    return value


def memory_limits(value: Any) -> tuple[str, dict[tuple[Any, ...], int]]:
    """A kind of device, and the lanes that fit into its memory by pack group, as JSON."""
    found = content(value)
    match found:
        case [str(device), [*limits]] if all(map(_is_limit, limits)):
            return device, {tuple(group): lanes for group, lanes in limits}
    raise _refused(value, "a list of memory limits")


def _is_limit(value: Any) -> bool:
    match value:
        case [[str(), str(), int(), int(), int(), str()], int(lanes)]:
            return 1 <= lanes <= MOST_LANES
    return False


def counts(value: Any) -> list[list[int]]:
    """Rows of each class at each client, as JSON."""
    found = content(value)
    if not isinstance(found, list) or not all(isinstance(client, list) for client in found):
        raise _refused(value, "a table of counts")
    return [[count(each) for each in client] for client in found]


def clients(value: Any) -> list[int]:
    """Numbers of clients, as JSON."""
    found = content(value)
    if not isinstance(found, list):
        raise _refused(value, "a list of clients")
    return [count(each) for each in found]


def count(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or not least <= value <= MOST_ROWS:
        raise _refused(value, "a number of rows")
    return value


def accuracy(value: Any) -> float | None:
    if value is not None and not 0 <= number(value) <= 100:
        raise _refused(value, "an accuracy")
    return value


def spec(value: Any) -> dict[str, Any]:
    """A trial specification, read from JSON. Pydantic checks the other fields where a trial is built from it."""
    found = read_parts(text(value))
    if found is None:
        found = content(value)
        if not isinstance(found, dict) or not isinstance(found.get("hyperparameters"), dict):
            raise _refused(value, "a trial")
        check_hyperparameters(found["hyperparameters"])
    privacy, last = found.get("privacy"), found.get("stop_after", "missing")
    if type(found.get("seed")) is not int or type(privacy) is not dict or type(privacy.get("clip")) not in (float, int):
        raise _refused(value, "a trial")
    rounds(found.get("rounds"))
    if last is not None:
        rounds(last)
    return found


def number(value: Any) -> Any:
    if type(value) is float:  # most are
        return value
    if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) >= LARGEST):
        raise _refused(value, "a number")
    return value


def rounds(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value <= MOST_ROUNDS:
        raise _refused(value, "a number of rounds")
    return value


def row(values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The columns of `trials` in their order, with the metrics read from JSON; and the specification read from JSON."""
    trial, specification, state, reason, last, share, loss, metrics, *account, seconds, correct = values
    if state not in STATES:
        raise _refused(state, "the state of a trial")
    if not isinstance(correct, bytes):
        raise _refused(correct, "packed bits")
    if loss is not None:
        number(loss)
    content, parsed = spec(specification), _metrics(metrics)
    accounts = [number(epsilon) for epsilon in account]
    columns = (
        *(key(trial), specification, state, line(reason), rounds(last), accuracy(share), loss, parsed),
        *(*accounts, number(seconds), correct),
    )
    return columns, content


def columns(rows: Sequence[Sequence[Any]], *, whole: bool = True) -> tuple[Sequence[Any], ...]:
    """As `row`, for many rows: their columns, and a column of specifications. Checking a whole column is faster.
    `whole=False`: metrics may be left out."""
    found = list(zip(*rows, strict=True))
    if not _are_plain(found):
        checked = [row(values) for values in rows]
        return (*zip(*(of_row for of_row, _ in checked), strict=True), [content for _, content in checked])
    metrics = list(map(_metrics, found[7])) if whole else [{}] * len(rows)
    return (*found[:7], metrics, *found[8:], list(map(spec, found[1])))


def _are_plain(found: Sequence[Sequence[Any]]) -> bool:
    """Whether every column apart from specifications and metrics holds only values that `row` returns unchanged."""
    keys, _, states, reasons, last, shares, losses, _, *numbers, correct = found
    kinds = [set(map(type, column)) for column in (reasons, last, correct)]
    if kinds != [{str}, {int}, {bytes}] or not _are_keys(keys):
        return False
    if any(set(map(type, column)) - {float, type(None)} for column in (shares, losses)):
        return False
    known = [share for share in shares if share is not None]
    return (
        all(set(map(type, column)) == {float} for column in numbers)
        and set(states) <= set(STATES)
        and all(map(str.isprintable, set(reasons)))
        and min(last) >= 0
        and max(last) <= MOST_ROUNDS
        and (not known or (min(known) >= 0 and max(known) <= 100))
    )


def _metrics(value: Any) -> dict[str, dict[int, Any]]:
    if value == "{}":
        return {}
    by_name = content(value)
    try:
        return {_metric(metric): _by_round(values) for metric, values in by_name.items()}
    except (ValueError, AttributeError) as error:
        raise sqlite3.DataError(f"metrics cannot be read: {error}") from None


@lru_cache(maxsize=10_000)
def _metric(name: str) -> str:
    """The name of a metric, which becomes the name of a column."""
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable() or name in NOT_METRICS:
        raise _refused(name, "the name of a metric")
    return name


def _by_round(found: dict[str, Any]) -> dict[int, Any]:
    values: Collection[Any] = found.values()
    if not set(map(type, values)) <= {float}:
        values = list(map(number, values))
    return dict(zip(map(_round, found), values, strict=True))


@lru_cache(maxsize=10_000)
def _round(text: str) -> int:
    return rounds(int(text))


def _refused(value: Any, expected: str) -> sqlite3.DataError:
    return sqlite3.DataError(f"{value!r:.50} is not {expected}")
