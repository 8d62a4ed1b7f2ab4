"""Brent's method, with the same steps as scipy.optimize.brentq. Every command that computes a privacy cost needs it,
and scipy.optimize takes half a second to import."""

from __future__ import annotations

import math
from collections.abc import Callable

ABSOLUTE, RELATIVE = 1e-15, 1e-14
"""Tolerances."""
MOST_STEPS = 100


def root(function: Callable[[float], float], low: float, high: float) -> float:
    """A root between `low` and `high`, where the function has different signs."""
    before, x, other = low, high, 0.0
    f_before, f, f_other = function(before), function(x), 0.0
    if f_before == 0:
        return before
    step_before = step = 0.0
    for _ in range(MOST_STEPS):
        if f_before != 0 and f != 0 and (f_before < 0) != (f < 0):
            other, f_other = before, f_before  # the root lies between x and `other`
            step_before = step = x - before
        if abs(f_other) < abs(f):
            before, x, other = x, other, x
            f_before, f, f_other = f, f_other, f
        tolerance = (ABSOLUTE + RELATIVE * abs(x)) / 2
        half = (other - x) / 2
        if f == 0 or abs(half) < tolerance:
            return x
        tried = math.inf
        if abs(step_before) > tolerance and abs(f) < abs(f_before):
            if before == other:  # a line through two points
                tried = -f * (x - before) / (f - f_before)
            else:  # inverse quadratic interpolation through three
                slope, of_other = (f_before - f) / (before - x), (f_other - f) / (other - x)
                tried = -f * (f_other * of_other - f_before * slope) / (of_other * slope * (f_other - f_before))
        if 2 * abs(tried) < min(abs(step_before), 3 * abs(half) - tolerance):
            step_before, step = step, tried
        else:
            step_before = step = half
        before, f_before = x, f
        x += step if abs(step) > tolerance else math.copysign(tolerance, half)
        f = function(x)
    raise ArithmeticError(f"no root was found in {MOST_STEPS} steps")
