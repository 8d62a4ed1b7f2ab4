"""The claimed ε of every run next to its actual ε, and the trade-off curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean

import pandas as pd

from orchestrator.report.tables.common import budget, cell_table, unfinished
from orchestrator.report.tables.render import NOTHING, Table, rounded_up
from orchestrator.results.frames import NAMES, names
from orchestrator.results.ledger import Row
from orchestrator.results.publications import total_of
from orchestrator.results.winners import CellResult, Results, actual_epsilon
from orchestrator.study.study import Study
from trainables.methods import METHODS
from trainables.privacy.gaussian import epsilon_of, least_false_negatives, mu_of
from trainables.privacy.plan import large_delta
from trainables.privacy.private_selection import all_released

PROTECTED = {
    "record": ("one record of one client", "per-example gradients"),
    "user": ("one client with all its records", "clients' updates"),
}
HEADINGS = {
    "epsilon_claimed": "Claimed ε",
    "epsilon_local": "Actual ε, local",
    "epsilon_secure": "Actual ε, secure aggregation",
    "epsilon_unsampled": "Actual ε, samples known",
}
EPSILONS = tuple(HEADINGS)
STATED = ("delta", "clip", "clipping", "release", "adjacency", "level")
NOT_PUBLISHED = (
    "ε with search composes all runs of a row, those of its search and all seeds, as if each had independent noise. "
    "The account covers one training run, published alone: neither the search nor the other seeds. "
    "Runs with the same seed share their noise, so two of them published together have no privacy. "
    "Anyone who knows the seed, which these tables print, can remove the noise: keep seeds secret where the data are "
    "private."
)
CLIPPING = {
    "plain": "clipped",
    "automatic": "clipped automatically (short ones are scaled up)",
    "adaptive": "clipped adaptively (after the first round to the private median of their norms)",
}
_mu_of = lru_cache(maxsize=1000)(mu_of)  # many cells have the same budget
_all_released = lru_cache(maxsize=1000)(all_released)
FALSE_POSITIVES = (0.0001, 0.001, 0.01, *(twentieths / 20 for twentieths in range(1, 20)), 0.99, 0.999)
MEASURED = ("clipped_share", "signal_norm", "noise_norm")
FIELDS = (
    *(*STATED, "center", "aggregate", *EPSILONS),
    *("epsilon_with_search", "mu", "rho_zcdp", *MEASURED, "claim_holds_for"),
)


def privacy(results: Results, setting: str) -> Table:
    cells, stated = results.of(setting), results.study.privacy
    sampled = any(_is_sampled(cell) for cell in cells)
    shown = EPSILONS if sampled else EPSILONS[:3]
    protected, clipped = PROTECTED[stated.level]
    caption = [
        f"The claim is (ε, {stated.delta:g})-differential privacy for {protected}, adjacency {stated.adjacency}, "
        f"against an observer of the {stated.release} release; {clipped} are {CLIPPING[stated.clipping]} to l2 norm "
        f"{_clips(results)}.",
        "Actual ε is what the added noise guarantees against an observer of every client's release (local), or of "
        "their sum only (secure aggregation), rounded up.",
        "The claim holds where actual ε does not exceed it; ≤ marks an upper bound.",
        "μ is the claim in Gaussian differential privacy.",
        "Clipped: share of the gradients that clipping shortened. "
        "Signal and Noise: l2 norms of the clients' mean clipped gradient and of their mean noise. "
        "These three are means over evaluated rounds and seeds.",
        _published(results) if results.study.private else NOT_PUBLISHED,
        *_to_a_client(results, cells),
        *_large_delta(results, setting),
    ]
    if sampled:
        caption.append(
            f"{HEADINGS['epsilon_unsampled']}: actual ε in the claim's release model against an observer who knows "
            "which rows or users were sampled; it differs only where some are sampled."
        )
    groups = []
    for epsilon in results.study.epsilons:
        mu = "" if math.isinf(epsilon) else f" (μ = {_mu_of(epsilon, stated.delta):.4g})"
        rows = [(cell, _row(cell, shown, results.study)) for cell in results.of(setting, epsilon)]
        groups.append((f"{budget(epsilon)}{mu}", rows))
    return cell_table(
        results,
        setting,
        title="Claimed and actual ε",
        summary="The claimed ε of every run next to the actual ε of its noise.",
        caption=[*caption, *unfinished(cells)],
        columns={
            **{HEADINGS[name]: "r" for name in shown},
            **{"ε with search": "r", "Claim holds for": "l", "Clipped (%)": "r", "Signal": "r", "Noise": "r"},
        },
        groups=groups,
        records=[(cell, _record(cell, results.study)) for cell in cells],
        fields=FIELDS,
    )


def with_search(cell: CellResult, study: Study) -> float:
    """The ε of all runs of the cell together, in the study's release model, if each had independent noise; of a private
    search, the ε of publishing its winner. nan without confirm runs, and for methods that sample, whose account is not
    a single mu."""
    rows = list(cell.confirm.values())
    if not rows or _is_sampled(cell):
        return math.nan
    worst, delta = max(map(actual_epsilon, rows)), rows[0].trial.privacy.delta
    if study.private:
        return total_of([cell], study)
    if math.isinf(worst):
        return math.inf
    return _all_released(_mu_of(worst, delta), cell.search.trials + len(rows), delta)


def _other_units(rows: Sequence[Row]) -> dict[str, float]:
    """The worst run as mu-GDP and as rho-zCDP, mu^2 / 2; nan with secret samples, whose account is not a single mu."""
    worst, delta = max(map(actual_epsilon, rows)), rows[0].trial.privacy.delta
    if any(row.epsilon_unsampled != actual_epsilon(row) for row in rows):
        return {"mu": math.nan, "rho_zcdp": math.nan}
    mu = _mu_of(worst, delta) if worst > 0 else 0.0
    return {"mu": mu, "rho_zcdp": mu**2 / 2}


def _clips(results: Results) -> str:
    own = {m.clip for m in results.study.methods if m.clip is not None}
    searched = [c.search.chosen for c in results.cells if c.search.chosen and "clip" in c.search.chosen]
    shown = sorted(own | {float(chosen["clip"]) for chosen in searched})
    values = ", ".join(f"{clip:g}" for clip in shown)
    if shown and all(m.clip is not None or "clip" in m.space().coarse for m in results.study.methods):
        return values
    return f"{results.study.privacy.clip:g}{f' (some methods: {values})' if shown else ''}"


def _published(results: Results) -> str:
    return (
        "ε with search is the cost of publishing the winner of one row's search alone, with its configuration, noisy "
        f"score and weights; the number of runs ({results.study.search.private.runs} distribution) stays secret. "
        "Clipped, Signal and Noise are not protected by the noise and therefore not shown. The test rows are assumed "
        "to be public."
    )


def _large_delta(results: Results, setting: str) -> list[str]:
    stated, facts = results.study.privacy, results.facts(setting)
    if facts is None or all(math.isinf(epsilon) for epsilon in results.study.epsilons):
        return []
    note = large_delta(stated.delta, stated.level, facts.protected)
    return [f"{note[0].upper()}{note[1:]}."] if note else []


def trade_offs(results: Results) -> pd.DataFrame:
    """The trade-off curve of every cell: the lowest false negative rate of any test for the presence of a record, by
    its false positive rate. Not for secret samples, whose curve does not follow from a single mu."""
    mus = [(cell, _other_units(list(cell.confirm.values()))["mu"]) for cell in results.cells if cell.confirm]
    lines = [
        (*names(cell).values(), mu, rate, least_false_negatives(mu, rate))
        for cell, mu in mus
        if not math.isnan(mu)
        for rate in FALSE_POSITIVES
    ]
    return pd.DataFrame(lines, columns=[*NAMES, "mu", "false_positives", "false_negatives"])


def _to_a_client(results: Results, cells: Sequence[CellResult]) -> list[str]:
    """A sentence on the ε against a client, which can subtract its own noise from the sum."""
    stated = results.study.privacy
    counts = [row.trial.problem.partition.clients for cell in cells for row in cell.confirm.values()]
    budgets = [epsilon for epsilon in results.study.epsilons if not math.isinf(epsilon)]
    if stated.release == "local" or not budgets or min(counts, default=1) < 2:
        return []
    clients, claimed = min(counts), budgets[0]
    actual = epsilon_of(mu_of(claimed, stated.delta) * math.sqrt(clients / (clients - 1)), stated.delta)
    return [
        "A client can subtract its own noise from the sum: against one of "
        f"{clients} clients a claimed ε of {claimed:g} is an actual ε of {rounded_up(actual)}."
    ]


def _record(cell: CellResult, study: Study) -> dict[str, object]:
    rows = list(cell.confirm.values())
    if not rows:
        return {}
    trial, numbers = rows[0].trial, _numbers(rows)
    return {
        **trial.privacy.model_dump(include=set(STATED)),
        "center": trial.preprocess.center,
        "aggregate": trial.aggregate,
        **numbers,
        "epsilon_with_search": with_search(cell, study),
        **_other_units(rows),
        "claim_holds_for": _holds(numbers),
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
    at_most = "≤ " if METHODS[cell.method.name].bound_only(trial.hyperparameters) else ""
    return [
        *(("" if name == "epsilon_claimed" else at_most) + rounded_up(numbers[name]) for name in shown),
        NOTHING if math.isnan(priced := with_search(cell, study)) else at_most + rounded_up(priced),
        _holds(numbers),
        *(NOTHING if text == "nan" else text for text in diagnostics),
    ]


def _numbers(rows: list[Row]) -> dict[str, float]:
    """The largest epsilons and the mean measurements over the seeds."""
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
