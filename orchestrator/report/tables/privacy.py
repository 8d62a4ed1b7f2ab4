"""What was promised and what the noise really buys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, Context, Decimal
from statistics import fmean

import pandas as pd

from orchestrator.report.tables.common import NAMES, budget, name_columns, named_rows, names, unfinished
from orchestrator.report.tables.render import NOTHING, Group, Table
from orchestrator.report.tables.results import CellResult, Results, bought
from orchestrator.results.ledger import Row
from trainables.privacy.gaussian import mu_of

WHOSE = {
    "record": ("one record of one client", "per-example gradients"),
    "user": ("one client with all its records", "clients' updates"),
}
_UP = Context(prec=4, rounding=ROUND_CEILING)
HEADINGS = {
    "epsilon_claimed": "ε claimed",
    "epsilon_local": "ε bought, local",
    "epsilon_secure": "ε bought, secure aggregation",
    "epsilon_unsampled": "ε unsampled",
}
EPSILONS = tuple(HEADINGS)
MEASURED = ("clipped_share", "signal_norm", "noise_norm")


def privacy(results: Results, setting: str) -> Table:
    sampled = any(_is_sampled(cell) for cell in results.of(setting))
    shown = EPSILONS if sampled else EPSILONS[:3]
    groups = []
    for epsilon in results.study.epsilons:
        cells = results.of(setting, epsilon)
        heading = f"{budget(epsilon)} (μ = {mu_of(epsilon, results.study.privacy.delta):.4g})"
        groups.append(
            Group(
                budget(epsilon) if math.isinf(epsilon) else heading,
                named_rows(results, cells, [_row(cell, shown) for cell in cells]),
            )
        )
    settings, cells = results.study.privacy, results.of(setting)
    protected, bounded = WHOSE[settings.level]
    caption = (
        f"The claim is (ε, {settings.delta:g})-differential privacy for {protected}, adjacency "
        f"{settings.adjacency}, as seen by one who sees the {settings.release} release; {bounded} are "
        f"clipped to l2 norm {settings.clip:g}. ε bought is what the noise really added is worth to one who sees every "
        "client's own release (local), and to one who sees only their sum (secure aggregation); it is rounded up. "
        "The claim holds where ε bought does not exceed it. μ is the claim in Gaussian differential privacy. "
        "Clipped: share of the gradients that clipping shortened. "
        "Signal and noise: l2 norms of the clients' mean clipped gradient and of their mean noise. These three are "
        "means over evaluated rounds and seeds. "
        "The account holds for one training run alone, published alone. The search and the other seeds are not in it, "
        "and runs that share a seed share their noise: of two of them, seen together, nothing stays private."
    )
    if sampled:
        caption += (
            " ε unsampled is what is bought in the claim's own release model to one who knows which rows were sampled; "
            "it differs only for methods that sample them."
        )
    return Table(
        title=f"ε claimed and ε bought: {setting}",
        summary="The privacy that was claimed for every run beside the privacy that its noise buys.",
        caption=" ".join([caption, *unfinished(cells)]),
        columns=[
            *name_columns(results),
            *(HEADINGS[name] for name in shown),
            *("Claim holds for", "Clipped (%)", "Signal", "Noise"),
        ],
        align="l" * len(name_columns(results)) + "r" * len(shown) + "lrrr",
        groups=groups,
        data=pd.DataFrame(
            [_record(cell) for cell in cells],
            columns=[*NAMES, "delta", "clip", "release", "adjacency", "level", *EPSILONS, *MEASURED, "claim_holds_for"],
        ),
    )


def _record(cell: CellResult) -> dict[str, object]:
    rows = list(cell.confirm.values())
    if not rows:
        return dict(names(cell))
    stated = rows[0].trial.privacy
    return {
        **names(cell),
        **stated.model_dump(include={"delta", "clip", "release", "adjacency", "level"}),
        **_numbers(rows),
        "claim_holds_for": _holds(_numbers(rows)),
    }


def _is_sampled(cell: CellResult) -> bool:
    return any(row.epsilon_unsampled != bought(row) for row in cell.confirm.values())


def _row(cell: CellResult, shown: Sequence[str]) -> list[str]:
    rows = list(cell.confirm.values())
    if not rows:
        return [NOTHING] * (len(shown) + 4)
    numbers = _numbers(rows)
    diagnostics = [f"{numbers[name]:.1f}" if name == "clipped_share" else f"{numbers[name]:.3g}" for name in MEASURED]
    return [
        *(_rounded_up(numbers[name]) for name in shown),
        _holds(numbers),
        *(NOTHING if text == "nan" else text for text in diagnostics),
    ]


def _numbers(rows: list[Row]) -> dict[str, float]:
    """Of epsilons the worst over the seeds, of what was measured the mean."""
    found = {name: max(getattr(row, name) for row in rows) for name in EPSILONS}
    for name in MEASURED:
        values = [value for row in rows for value in row.metrics.get(name, {}).values() if math.isfinite(value)]
        found[name] = fmean(values) if values else math.nan
    return found


def _holds(numbers: dict[str, float]) -> str:
    models = {"local": "epsilon_local", "secure aggregation": "epsilon_secure"}
    if math.isinf(numbers["epsilon_claimed"]):
        return "no privacy claimed"
    return " and ".join(m for m, name in models.items() if numbers[name] <= numbers["epsilon_claimed"]) or "neither"


def _rounded_up(epsilon: float) -> str:
    """A rounded epsilon may say too much privacy was spent, never too little."""
    return "∞" if math.isinf(epsilon) else f"{_UP.create_decimal(Decimal(repr(epsilon))).normalize():f}"
