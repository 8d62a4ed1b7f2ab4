"""The exception for bad input, and validators that name the value at fault."""

from __future__ import annotations

from collections.abc import Collection


class UserError(Exception):
    """Bad input. The message is one sentence with the name and value at fault; the command exits with 2."""


def in_range(low: float, high: float, /, *, open_low: bool = False, open_high: bool = False, **values: float) -> None:
    """Raise unless every named value lies in the range: ``in_range(0, 1, beta=beta)``. NaN lies in no range."""
    for name, value in values.items():
        above = value > low if open_low else value >= low
        below = value < high if open_high else value <= high
        if not (above and below):
            left, right = "(" if open_low else "[", ")" if open_high else "]"
            raise UserError(f"{name} = {value:g} is not in {left}{_format_bound(low)}, {_format_bound(high)}{right}")


def _format_bound(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def one_of(allowed: Collection[str], /, **values: str) -> None:
    """Raise unless every named value is allowed; the message lists the allowed values."""
    for name, value in values.items():
        if value not in allowed:
            raise UserError(f"{name} = {value!r} is unknown; choose one of: {', '.join(allowed)}")
