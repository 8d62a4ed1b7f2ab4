"""The page's data of a surface, the model of the strategy `surface`: the expected score at any budget, and the
predictions that the contest checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.results.surfaces import Finalist, Point, StudySurface  # imports SciPy, which is slow


def surface_data(surface: StudySurface) -> dict[str, Any]:
    axes = list(surface.lattice.axes)

    def shown(point: Point | Finalist) -> dict[str, Any]:
        values = vars(point) | {"values": [point.configuration[name] for name in axes]}
        return {name: value for name, value in values.items() if name != "configuration"}

    return {
        "setting": surface.setting,
        "method": surface.method.shown,
        "axes": axes,
        "points": [shown(point) for point in surface.curve()],
        "finalists": [shown(finalist) for finalist in surface.finalists],
    }
