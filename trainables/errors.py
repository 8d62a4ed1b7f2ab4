"""The exception for bad input, and validators that name the value at fault."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input. The message is one sentence with the name and value at fault; the command exits with 2."""


LOAD_A_PLUGIN = "; --import MODULE adds those of a plug-in"
"""The end of a sentence about an unknown name, where plug-ins can add names."""


def in_range(low: float, high: float, ends: str = "[]", /, **values: float) -> None:
    """Raise unless every named value lies in the interval. ``in_range(0, 1, "(]", q=q)`` excludes 0 and includes 1;
    NaN lies in no interval."""
    for name, value in values.items():
        above = value > low if ends[0] == "(" else value >= low
        below = value < high if ends[1] == ")" else value <= high
        if not (above and below):
            raise UserError(f"{name} = {_shown(value)} is not in {ends[0]}{_format(low)}, {_format(high)}{ends[1]}")


def _shown(value: float) -> str:
    try:
        return f"{value:g}"
    except OverflowError:  # an integer too large for a float
        return f"{value!s:.20}…"


def _format(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def one_of(allowed: Iterable[str], /, **values: str) -> None:
    """Raise unless every named value is allowed; the message lists the allowed values."""
    for name, value in values.items():
        if value not in allowed:
            raise UserError(f"{name} = {value!r} is unknown; {choices(value, allowed)}")


def choices(value: str, allowed: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the most similar name, if there is one, and all names."""
    names = list(allowed)
    close = difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.7)
    close += [name for name in names if len(value) > 1 and value.lower() in name]
    ask = f"did you mean {close[0]}? Choose" if close else "choose"
    return f"{ask} one of: {', '.join(names)}"
