"""The expected score at and between the searched budgets, by the models (surfaces) that the strategy `surface` fits."""

from __future__ import annotations

import pandas as pd

from orchestrator.report.tables.render import Group, Table
from orchestrator.report.tables.tuning import shown_value
from orchestrator.results.winners import Results


def frontier(results: Results, setting: str) -> Table | None:
    """None where no method was searched by the strategy `surface`."""
    surfaces = [surface for surface in results.surfaces if surface.setting == setting]
    if not surfaces:
        return None
    objective, groups, records = results.study.objective_spec, [], []
    for surface in surfaces:
        rows = []
        for point in surface.curve():
            axes = {name: point.configuration[name] for name in surface.lattice.axes}
            rows.append(
                [
                    f"{point.epsilon:g}",
                    f"{objective.format(point.score)} ± {objective.format(2 * point.deviation)}",
                    f"{point.noise:.4g}",
                    ", ".join(f"{name}={shown_value(value)}" for name, value in axes.items()),
                    "yes" if point.searched else "no",
                ]
            )
            records.append(
                {
                    "method": surface.method.shown,
                    "epsilon": point.epsilon,
                    "expected": point.score,
                    "deviation": point.deviation,
                    "noise": point.noise,
                    "searched": point.searched,
                    **axes,
                }
            )
        groups.append(Group(surface.method.shown, rows))
    return Table(
        title="Expected score by budget",
        summary="The expected validation score at any budget, with the configuration for it, by the surface.",
        caption=(
            f"Expected validation {objective.title}{objective.unit} of the best configuration, ± two standard "
            "deviations, by the model of all trials of the search and the contests. Noise: the noise multiplier of a "
            "round. Searched: whether the study has trials at this budget."
        ),
        columns=["ε", f"Expected{objective.unit}", "Noise", "Configuration", "Searched"],
        align="rrrpl",
        groups=groups,
        data=pd.DataFrame(records),
    )
