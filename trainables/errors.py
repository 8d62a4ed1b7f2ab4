"""What goes wrong through no fault of the program, said in one sentence."""

from __future__ import annotations

from collections.abc import Collection


class UserError(Exception):
    """Bad input. The message is one sentence with the name and value at fault; the command exits with 2."""


def in_range(low: float, high: float, *, open_low: bool = False, open_high: bool = False, **named: float) -> None:
    """Raise unless every named value lies in the range: ``in_range(0, 1, beta=beta)``. NaN never does."""
    for name, value in named.items():
        name_in_range(name, value, low, high, open_low=open_low, open_high=open_high)


def name_in_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> None:
    """`in_range` for a name that is no identifier."""
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    if not (above and below):
        brackets = "(" if open_low else "[", ")" if open_high else "]"
        raise UserError(f"{name} = {value:g} is not in {brackets[0]}{_shown(low)}, {_shown(high)}{brackets[1]}")


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def one_of(allowed: Collection[str], **named: str) -> None:
    """Raise unless every named value is among the allowed ones, which the message lists."""
    for name, value in named.items():
        if value not in allowed:
            raise UserError(f"{name} = {value!r} is unknown; it is one of: {', '.join(allowed)}")
