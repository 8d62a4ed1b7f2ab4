"""The one look of all figures, drawn here or in a browser: colours that the colour-blind can tell apart, and for more
methods than colours, lines and marks that differ as well.

Any two of the eight differ clearly to normal sight and under simulated protanopia, deuteranopia and tritanopia, and
each stands out from its background (tests/test_palette.py measures both).
"""

from __future__ import annotations

from typing import NamedTuple

ON_LIGHT = ("#0072b2", "#d55e00", "#222222", "#2f9e5f", "#8800ff", "#d27991", "#7b2e12", "#540d59")
ON_DARK = ("#56b4e9", "#e69f00", "#f0f0f0", "#9be564", "#9b6bff", "#ff8fc7", "#d9003a", "#be1b87")
LIGHT, DARK = "#ffffff", "#14181d"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""By the names of matplotlib; a browser draws the same shapes."""
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))
"""On and off lengths, in widths of the line; nothing: a solid one."""


class Look(NamedTuple):
    colour: int
    marker: int
    dash: int
    hollow: bool
    """Whether marks are outlines."""


def look(number: int, variant: int = 0) -> Look:
    """Of the method with this number; a variant of it (another way of searching) has its colour, another line
    and hollow marks."""
    colour, turn = number % len(ON_LIGHT), number // len(ON_LIGHT)
    return Look(colour, (number + turn) % len(MARKERS), (turn + variant) % len(DASHES), variant > 0)
