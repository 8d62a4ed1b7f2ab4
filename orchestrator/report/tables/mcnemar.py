"""McNemar's test: is the reference method better than another on the same test rows, or was it luck?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import chdtrc

from orchestrator.report.tables.common import NAMES, budget, name_columns, named_rows, names, unfinished
from orchestrator.report.tables.render import NOTHING, Bold, Group, Table
from orchestrator.report.tables.results import CellResult, Results
from orchestrator.results.ledger import Row
from trainables.objective import ACCURACY

SIGNIFICANCE = 0.05
SMALLEST_P = 0.0001
WORDS = {"+": "better", "-": "worse", "=": "equal"}
"""In CSV files, where a sign would be taken for a formula."""


@dataclass(frozen=True)
class Comparison:
    """Two models on the same rows."""

    n10: int
    """Rows that the reference has right and the other wrong."""
    n01: int

    @classmethod
    def of(cls, reference: bytes, other: bytes, rows: int | None = None) -> Comparison:
        """From packed bits; what pads the last byte is not a row."""
        a, b = (np.unpackbits(np.frombuffer(bits, np.uint8), count=rows).astype(bool) for bits in (reference, other))
        return cls(n10=int((a & ~b).sum()), n01=int((~a & b).sum()))

    @property
    def chi2(self) -> float:
        """Continuity-corrected."""
        differing = self.n10 + self.n01
        return max(abs(self.n10 - self.n01) - 1, 0) ** 2 / differing if differing else 0.0

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
    reference, seed, last = study.reference, study.seeds.confirm[0], study.last_round
    rows = results.facts.get(f"test_rows:{setting}")
    groups, records = [], []
    for epsilon in study.epsilons:
        mine = results.of(setting, epsilon)
        references = {cell.way: _judged(cell, seed) for cell in mine if cell.method == reference}
        others = [cell for cell in mine if cell.method != reference]
        lines = []
        for cell in others:
            ours, theirs = references[cell.way], _judged(cell, seed)
            found = Comparison.of(ours.correct, theirs.correct, rows) if ours and theirs else None
            lines.append([_accuracy(theirs), *(_cells(found) if found else [NOTHING] * 5)])
            records.append(
                {
                    **names(cell),
                    "reference": reference.shown,
                    "seed": seed,
                    "test_rows": rows,
                    "reference_accuracy": ours.accuracy if ours else None,
                    "accuracy": theirs.accuracy if theirs else None,
                    "n10": found.n10 if found else None,
                    "n01": found.n01 if found else None,
                    "chi2": found.chi2 if found else None,
                    "p": found.p if found else None,
                    "reference_is": WORDS[found.sign] if found else None,
                }
            )
        ours_text = ", ".join(
            f"{reference.shown}{f' ({way})' if results.both_ways else ''} {_accuracy(row)} %"
            for way, row in references.items()
        )
        groups.append(Group(f"{budget(epsilon)}: {ours_text}", named_rows(results, others, lines)))
    counted = f" {rows}" if rows else ""
    name = reference.shown
    caption = (
        f"{name} against each other method on the{counted} test rows after round {last}, seed {seed}. n10: rows that "
        f"{name} has right and the other wrong; n01: the reverse. χ² is continuity-corrected. Sign: {name} is better "
        f"(+), worse (-) or the same (=). p below {SIGNIFICANCE} is bold. The test asks whether these two models "
        "differ, not whether training again with another seed would; p is not corrected for the number of comparisons."
    )
    return Table(
        title=f"McNemar's test, {reference.shown} against the others: {setting}",
        summary=f"Whether {reference.shown} differs from each other method by more than chance on the test rows.",
        caption=" ".join([caption, *unfinished(results.of(setting))]),
        columns=[*name_columns(results), "Accuracy (%)", "n10", "n01", "χ²", "p", "Sign"],
        align="l" * len(name_columns(results)) + "rrrrrr",
        groups=groups,
        data=pd.DataFrame(
            records,
            columns=[
                *NAMES,
                *("reference", "seed", "test_rows", "reference_accuracy", "accuracy"),
                *("n10", "n01", "chi2", "p", "reference_is"),
            ],
        ).astype({"test_rows": "Int64", "n10": "Int64", "n01": "Int64"}),
    )


def _judged(cell: CellResult, seed: int) -> Row | None:
    """The confirm trial of this seed, if it says of every test row whether it was right."""
    row = cell.confirm.get(seed)
    return row if row is not None and row.state == "done" and row.correct else None


def _accuracy(row: Row | None) -> str:
    return NOTHING if row is None or row.accuracy is None else f"{row.accuracy:.2f}"


def _cells(found: Comparison) -> list[str]:
    p = f"<{SMALLEST_P}" if found.p < SMALLEST_P else f"{found.p:.4f}"
    shown = Bold(p) if found.p < SIGNIFICANCE else p
    return [str(found.n10), str(found.n01), f"{found.chi2:.3f}", shown, found.sign]
