"""Colours, marks and dashes of all figures, in print and in the browser. With more methods than colours, marks and
dashes distinguish them.

Any two of the eight colours differ clearly with normal vision and under simulated protanopia, deuteranopia and
tritanopia, and each contrasts with its background (tests/test_palette.py measures both).
"""

from __future__ import annotations

from typing import NamedTuple

ON_LIGHT = ("#0072b2", "#d55e00", "#222222", "#2f9e5f", "#8800ff", "#d27991", "#7b2e12", "#540d59")
ON_DARK = ("#56b4e9", "#e69f00", "#f0f0f0", "#9be564", "#9b6bff", "#ff8fc7", "#d9003a", "#be1b87")
LIGHT, DARK = "#ffffff", "#14181d"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""matplotlib's names; the browser draws the same shapes."""
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))
"""On and off lengths in line widths; empty: a solid line."""


class Look(NamedTuple):
    colour: int
    marker: int
    dash: int
    hollow: bool
    """Whether marks are drawn as outlines."""


def look(number: int, variant: int = 0) -> Look:
    """The look of the method with this number. A variant of it (another search strategy) has the same colour, another
    dash and hollow marks."""
    colour, turn = number % len(ON_LIGHT), number // len(ON_LIGHT)
    return Look(colour, (number + turn) % len(MARKERS), (turn + variant) % len(DASHES), variant > 0)
