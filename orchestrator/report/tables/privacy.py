"""What was promised and what the noise really buys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, Context, Decimal
from statistics import fmean

import pandas as pd

from orchestrator.report.tables.common import NAMES, budget, name_columns, named_rows, names, unfinished
from orchestrator.report.tables.render import NOTHING, Group, Table
from orchestrator.results.ledger import Row
from orchestrator.results.winners import CellResult, Results, actual_epsilon
from orchestrator.search.private_search import price, price_of_all
from orchestrator.study.settings import Study
from trainables.methods import METHODS
from trainables.privacy.gaussian import epsilon_of, least_false_negatives, mu_of
from trainables.privacy.plan import large_delta
from trainables.privacy.private_selection import all_released

WHOSE = {
    "record": ("one record of one client", "per-example gradients"),
    "user": ("one client with all its records", "clients' updates"),
}
_UP = Context(prec=4, rounding=ROUND_CEILING)
HEADINGS = {
    "epsilon_claimed": "ε claimed",
    "epsilon_local": "ε actual, local",
    "epsilon_secure": "ε actual, secure aggregation",
    "epsilon_unsampled": "ε unsampled",
}
EPSILONS = tuple(HEADINGS)
NOT_PUBLISHED = (
    "ε with search is what all runs of a row, those of its search and all seeds, would cost together, composed, "
    "had each had noise of its own. "
    "The account holds for one training run alone, published alone. The search and the other seeds are not in it, "
    "and runs that share a seed share their noise: of two of them, seen together, nothing stays private. "
    "Whoever knows the seed, which these tables print, can take the noise off: of what is to stay private, keep it."
)
HOW = {
    "plain": "clipped",
    "automatic": "clipped (automatically: short ones are stretched)",
    "adaptive": "clipped (adaptively: after the first round to the private median of their lengths)",
}
FALSE_POSITIVES = (0.0001, 0.001, 0.01, *(tenth / 20 for tenth in range(1, 20)), 0.99, 0.999)
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
                named_rows(results, cells, [_row(cell, shown, results.study) for cell in cells]),
            )
        )
    settings, cells = results.study.privacy, results.of(setting)
    protected, bounded = WHOSE[settings.level]
    caption = (
        f"The claim is (ε, {settings.delta:g})-differential privacy for {protected}, adjacency "
        f"{settings.adjacency}, as seen by one who sees the {settings.release} release; {bounded} are "
        f"{HOW[settings.clipping]} to l2 norm {_clips(results)}. "
        "ε actual is what the noise really added is worth to one who sees every "
        "client's own release (local), and to one who sees only their sum (secure aggregation); it is rounded up. "
        "The claim holds where ε actual does not exceed it; ≤ stands where only a bound can be proven. "
        "μ is the claim in Gaussian differential privacy. "
        "Clipped: share of the gradients that clipping shortened. "
        "Signal and noise: l2 norms of the clients' mean clipped gradient and of their mean noise. These three are "
        "means over evaluated rounds and seeds. "
    )
    caption += _published(results, cells) if results.study.private else NOT_PUBLISHED
    caption += _to_a_client(results, cells) + _too_large_a_delta(results, setting)
    if sampled:
        caption += (
            " ε unsampled is the actual ε in the claim's own release model to one who knows which rows were sampled, "
            "or which users; it differs only where some are."
        )
    return Table(
        title=f"ε claimed and ε actual: {setting}",
        summary="The privacy that was claimed for every run beside the privacy that its noise buys.",
        caption=" ".join([caption, *unfinished(cells)]),
        columns=[
            *name_columns(results),
            *(HEADINGS[name] for name in shown),
            *("ε with search", "Claim holds for", "Clipped (%)", "Signal", "Noise"),
        ],
        align="l" * len(name_columns(results)) + "r" * len(shown) + "rlrrr",
        groups=groups,
        data=pd.DataFrame(
            [_record(cell, results.study) for cell in cells],
            columns=[
                *NAMES,
                "delta",
                "clip",
                "clipping",
                "release",
                "adjacency",
                "level",
                "center",
                "aggregate",
                *EPSILONS,
                "epsilon_with_search",
                "mu",
                "rho_zcdp",
                *MEASURED,
                "claim_holds_for",
            ],
        ),
    )


def with_search(cell: CellResult, study: Study) -> float:
    """What all runs of the cell cost together, seen in the study's release model, had each had noise of its own; of a
    private search, what its winner costs. Not said of methods that sample: their price is no single mu."""
    rows = list(cell.confirm.values())
    if not rows or _is_sampled(cell):
        return math.nan
    worst, delta = max(map(actual_epsilon, rows)), rows[0].trial.privacy.delta
    if study.private:
        return price(worst, cell.epsilon, study, cell.method.space())
    if math.isinf(worst):
        return math.inf
    return all_released(mu_of(worst, delta), cell.search.trials + len(rows), delta)


def _other_units(rows: Sequence[Row]) -> dict[str, float]:
    """The worst run as mu-GDP and as rho-zCDP, mu^2 / 2; not for secret samples, which have neither."""
    worst, delta = max(map(actual_epsilon, rows)), rows[0].trial.privacy.delta
    if any(row.epsilon_unsampled != actual_epsilon(row) for row in rows):
        return {"mu": math.nan, "rho_zcdp": math.nan}
    mu = mu_of(worst, delta) if worst > 0 else 0.0
    return {"mu": mu, "rho_zcdp": mu**2 / 2}


def _clips(results: Results) -> str:
    own = {m.clip for m in results.study.methods if m.clip is not None}
    searched = [c.search.chosen for c in results.cells if c.search.chosen and "clip" in c.search.chosen]
    shown = sorted(own | {float(chosen["clip"]) for chosen in searched})
    others = f" (some methods: {', '.join(f'{clip:g}' for clip in shown)})" if shown else ""
    return f"{results.study.privacy.clip:g}{others}"


def _published(results: Results, cells: Sequence[CellResult]) -> str:
    """What publishing a private search costs, a row of it or all."""
    study, here = results.study, [cell for cell in cells if cell.confirm]
    runs = study.search.private.runs
    text = (
        f"ε with search is what it costs to publish the winner of a row's search: one of a {runs} number of runs, "
        "which stays secret, with its configuration, its noisy score and its weights. This table and all others in "
        "this folder may be published at that price; the ledger and the log beside them may not. Clipped, signal and "
        "noise are not private, so they are not shown. The test rows are taken to be nobody's."
    )
    if len(here) < 2:
        return text
    total = price_of_all(
        [(max(map(actual_epsilon, cell.confirm.values())), cell.epsilon, cell.method.space()) for cell in here], study
    )
    return f"{text} All {len(here)} rows together, for they are about the same records, cost ε = {_rounded_up(total)}."


def _too_large_a_delta(results: Results, setting: str) -> str:
    stated, count = results.study.privacy, results.facts.get(f"protected:{setting}")
    if count is None or all(math.isinf(epsilon) for epsilon in results.study.epsilons):
        return ""
    note = large_delta(stated.delta, stated.level, count)
    return f" {note[0].upper()}{note[1:]}." if note else ""


def trade_offs(results: Results) -> pd.DataFrame:
    """The trade-off curve of every row: how often one who guesses whether a record is there must miss it, given how
    often a false alarm is raised. Not for secret samples, whose curve is no single mu's."""
    lines = []
    for cell in results.cells:
        mu = _other_units(list(cell.confirm.values()))["mu"] if cell.confirm else math.nan
        if not math.isnan(mu):
            lines += [
                {
                    **names(cell),
                    "mu": mu,
                    "false_positives": alarms,
                    "false_negatives": least_false_negatives(mu, alarms),
                }
                for alarms in FALSE_POSITIVES
            ]
    return pd.DataFrame(lines, columns=[*NAMES, "mu", "false_positives", "false_negatives"])


def _to_a_client(results: Results, cells: Sequence[CellResult]) -> str:
    """A sentence on what a client sees that takes its own noise off the sum."""
    stated = results.study.privacy
    counts = [row.trial.problem.partition.clients for cell in cells for row in cell.confirm.values()]
    budgets = [epsilon for epsilon in results.study.epsilons if not math.isinf(epsilon)]
    if stated.release == "local" or not budgets or min(counts, default=1) < 2:
        return ""
    clients, claimed = min(counts), budgets[0]
    found = epsilon_of(mu_of(claimed, stated.delta) * math.sqrt(clients / (clients - 1)), stated.delta)
    return (
        f" A client can take its own noise off the sum: to one of {clients} a claimed {claimed:g} is worth "
        f"{_rounded_up(found)}."
    )


def _record(cell: CellResult, study: Study) -> dict[str, object]:
    rows = list(cell.confirm.values())
    if not rows:
        return dict(names(cell))
    stated = rows[0].trial.privacy
    return {
        **names(cell),
        **{name: getattr(stated, name) for name in ("delta", "clip", "clipping", "release", "adjacency", "level")},
        "center": rows[0].trial.preprocess.center,
        "aggregate": rows[0].trial.aggregate,
        **_numbers(rows),
        "epsilon_with_search": with_search(cell, study),
        **_other_units(rows),
        "claim_holds_for": _holds(_numbers(rows)),
    }


def _is_sampled(cell: CellResult) -> bool:
    return any(row.epsilon_unsampled != actual_epsilon(row) for row in cell.confirm.values())


def _row(cell: CellResult, shown: Sequence[str], study: Study) -> list[str]:
    rows = list(cell.confirm.values())
    if not rows:
        return [NOTHING] * (len(shown) + 5)
    numbers = _numbers(rows)
    diagnostics = [f"{numbers[name]:.1f}" if name == "clipped_share" else f"{numbers[name]:.3g}" for name in MEASURED]
    trial = rows[0].trial
    at_most = "≤ " if METHODS[trial.method].bound_only(trial.hyperparameters) else ""
    return [
        *(("" if name == "epsilon_claimed" else at_most) + _rounded_up(numbers[name]) for name in shown),
        NOTHING if math.isnan(priced := with_search(cell, study)) else at_most + _rounded_up(priced),
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
