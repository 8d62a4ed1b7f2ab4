"""McNemar's test: is the reference method better than another on the same test rows, or was it luck?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import pandas as pd
from scipy.special import chdtrc

from orchestrator.report.tables.common import NAMES, budget, name_columns, named_rows, names, unfinished
from orchestrator.report.tables.differences import SIGNIFICANCE, holm, shown_p
from orchestrator.report.tables.render import NOTHING, Bold, Group, Table
from orchestrator.results.ledger import Row
from orchestrator.results.winners import CellResult, Results
from orchestrator.study.objective import ACCURACY
from orchestrator.study.settings import SECRET

WORDS = {"+": "better", "-": "worse", "=": "equal"}
"""In CSV files, where a sign would be taken for a formula."""


@dataclass(frozen=True)
class Comparison:
    """Two methods on the same rows, with one seed or several."""

    n10: int
    """Rows that the reference has right and the other wrong, summed over the seeds."""
    n01: int
    squares: int
    """Over the rows: the square of (how many seeds favour the reference minus how many favour the other)."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[bytes, bytes]], rows: int | None = None) -> Comparison:
        """From the packed bits of both, seed by seed; what pads the last byte is not a row."""
        n10, n01, favour = 0, 0, np.zeros(0, dtype=np.int64)
        for bits in pairs:
            a, b = (np.unpackbits(np.frombuffer(one, np.uint8), count=rows).astype(np.int64) for one in bits)
            n10, n01 = n10 + int((a > b).sum()), n01 + int((a < b).sum())
            favour = a - b if favour.size == 0 else favour + a - b
        return cls(n10, n01, int((favour**2).sum()))

    @property
    def chi2(self) -> float:
        """Continuity-corrected. A row that several seeds judge counts as one observation: with one seed the squares add
        up to n10 + n01, and this is McNemar's statistic."""
        return max(abs(self.n10 - self.n01) - 1, 0) ** 2 / self.squares if self.squares else 0.0

    @property
    def p(self) -> float:
        """The upper tail of chi squared with one degree of freedom (scipy.stats.chi2.sf, without its long import)."""
        return float(chdtrc(1, self.chi2))

    @property
    def sign(self) -> str:
        return "+" if self.n10 > self.n01 else "-" if self.n10 < self.n01 else "="


def mcnemar(results: Results, setting: str) -> Table | None:
    """Form of tables 15 and 16 of the DP-FedSOFIM paper; None if there is nothing to compare with."""
    study = results.study
    if len(study.methods) < 2 or study.judged_by is not ACCURACY:
        return None
    reference, seeds = study.reference, study.seeds.confirm
    rows = results.facts.get(f"test_rows:{setting}")
    ours = {(cell.epsilon, cell.strategy): _judged(cell) for cell in results.of(setting) if cell.method == reference}
    others = [cell for cell in results.of(setting) if cell.method != reference]
    found = [_compared(ours[cell.epsilon, cell.strategy], _judged(cell), rows) for cell in others]
    level = dict(zip([k for k, f in enumerate(found) if f], holm([f.p for f in found if f]), strict=True))
    lines = {id(cell): _line(cell, found[k], level.get(k)) for k, cell in enumerate(others)}
    records = [
        _record(cell, ours[cell.epsilon, cell.strategy], found[k], level.get(k), reference.shown, rows)
        for k, cell in enumerate(others)
    ]
    groups = []
    for epsilon in study.epsilons:
        here = [cell for cell in others if cell.epsilon == epsilon]
        ours_text = ", ".join(
            f"{reference.shown}{f' ({strategy})' if results.several_strategies else ''} {_accuracy(judged)} %"
            for (at, strategy), judged in ours.items()
            if at == epsilon
        )
        groups.append(Group(f"{budget(epsilon)}: {ours_text}", named_rows(results, here, [lines[id(c)] for c in here])))
    counted = f" {rows}" if rows else ""
    name = reference.shown
    seeds_text = f"seed {seeds[0]}" if len(seeds) == 1 else f"over all {len(seeds)} confirm seeds that both have"
    elsewhere = ": for that see the differences over seeds" if len(seeds) > 1 else ""
    if study.private:
        seeds_text = "of the models that are published"
    caption = (
        f"{name} against each other method on the{counted} test rows after the last round, {seeds_text}. n10: rows "
        f"that {name} has right and the other wrong, summed over the seeds; n01: the reverse. χ² is "
        "continuity-corrected, and a row counts as one observation however many seeds judge it. "
        f"Sign: {name} is better (+), worse (-) or the same (=). p (Holm) is corrected for all {len(level)} "
        f"comparisons of this table; below {SIGNIFICANCE} it is bold. The test asks whether these trained models "
        f"differ on rows like these, not whether training again with other seeds would show it{elsewhere}."
    )
    return Table(
        title=f"McNemar's test, {reference.shown} against the others: {setting}",
        summary=f"Whether {reference.shown} differs from each other method by more than chance on the test rows.",
        caption=" ".join([caption, *unfinished(results.of(setting))]),
        columns=[*name_columns(results), "Accuracy (%)", "n10", "n01", "χ²", "p", "p (Holm)", "Sign"],
        align="l" * len(name_columns(results)) + "rrrrrrr",
        groups=groups,
        data=pd.DataFrame(
            records,
            columns=[
                *NAMES,
                *("reference", "seeds", "test_rows", "reference_accuracy", "accuracy"),
                *("n10", "n01", "chi2", "p", "p_holm", "reference_is"),
            ],
        ).astype({"test_rows": "Int64", "n10": "Int64", "n01": "Int64"}),
    )


Judged = dict[int, Row]
"""By seed: the confirm trials that say of every test row whether it was right."""


def _judged(cell: CellResult) -> Judged:
    return {seed: row for seed, row in cell.confirm.items() if row.state == "done" and row.correct}


def _compared(ours: Judged, theirs: Judged, rows: int | None) -> Comparison | None:
    both = [(ours[seed].correct, theirs[seed].correct) for seed in ours if seed in theirs]
    return Comparison.of(both, rows) if both else None


def _mean(judged: Judged) -> float | None:
    found = [row.accuracy for row in judged.values() if row.accuracy is not None]
    return fmean(found) if found else None


def _accuracy(judged: Judged) -> str:
    mean = _mean(judged)
    return NOTHING if mean is None else f"{mean:.2f}"


def _line(cell: CellResult, found: Comparison | None, corrected: float | None) -> list[str]:
    accuracy = _accuracy(_judged(cell))
    if found is None or corrected is None:
        return [accuracy, *[NOTHING] * 6]
    p = shown_p(corrected)
    marked = Bold(p) if corrected < SIGNIFICANCE else p
    return [accuracy, str(found.n10), str(found.n01), f"{found.chi2:.3f}", shown_p(found.p), marked, found.sign]


def _record(
    cell: CellResult, ours: Judged, found: Comparison | None, corrected: float | None, reference: str, rows: int | None
) -> dict[str, object]:
    theirs = _judged(cell)
    return {
        **names(cell),
        "reference": reference,
        "seeds": " ".join(str(seed) for seed in ours if seed in theirs and seed != SECRET),
        "test_rows": rows,
        "reference_accuracy": _mean(ours),
        "accuracy": _mean(theirs),
        "n10": found.n10 if found else None,
        "n01": found.n01 if found else None,
        "chi2": found.chi2 if found else None,
        "p": found.p if found else None,
        "p_holm": corrected,
        "reference_is": WORDS[found.sign] if found else None,
    }
