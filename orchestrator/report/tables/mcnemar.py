"""McNemar's test: do the trained models of two methods differ significantly on the same test rows?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy.special import chdtrc

from orchestrator.report.tables.common import budget, cell_table, method_name, unfinished
from orchestrator.report.tables.differences import (
    SIGNIFICANCE,
    against_reference,
    bold_if_significant,
    comparisons,
    holm,
    shown_p,
)
from orchestrator.report.tables.render import NOTHING, Table
from orchestrator.results.ledger import Row
from orchestrator.results.winners import CellResult, Results
from orchestrator.search.objective import ACCURACY
from orchestrator.search.variant import SECRET

SIGN_WORDS = {"+": "better", "-": "worse", "=": "equal"}
"""For CSV files, where a spreadsheet would take a sign for a formula."""


@dataclass(frozen=True)
class Comparison:
    """Two methods on the same rows, with one seed or several."""

    n10: int
    """Rows that the reference has right and the other wrong, summed over the seeds."""
    n01: int
    squares: int
    """Sum over rows of the squared net count: seeds that favour the reference minus seeds that favour the other."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[bytes, bytes]], rows: int | None = None) -> Comparison:
        """`pairs`: for every seed, the rows that the reference and the other method have right, as packed bits.
        `rows`: the number of rows, to drop the padding of the last byte."""
        n10, n01, favour = 0, 0, np.zeros(0, dtype=np.int64)
        for bits in pairs:
            a, b = (np.unpackbits(np.frombuffer(one, np.uint8), count=rows).astype(np.int64) for one in bits)
            n10, n01 = n10 + int((a > b).sum()), n01 + int((a < b).sum())
            favour = a - b if favour.size == 0 else favour + a - b
        return cls(n10, n01, int((favour**2).sum()))

    @property
    def chi2(self) -> float:
        """Continuity-corrected. A row that several seeds evaluate counts as one observation. With one seed the squares
        sum to n10 + n01, and this is McNemar's statistic."""
        return max(abs(self.n10 - self.n01) - 1, 0) ** 2 / self.squares if self.squares else 0.0

    @property
    def p(self) -> float:
        """Upper tail of chi squared with one degree of freedom (as scipy.stats.chi2.sf, which takes long to import)."""
        return float(chdtrc(1, self.chi2))

    @property
    def sign(self) -> str:
        return "+" if self.n10 > self.n01 else "-" if self.n10 < self.n01 else "="


EvaluatedRuns = dict[int, Row]
"""By seed: the confirm trials that recorded which test rows they classified correctly."""


def mcnemar(results: Results, setting: str) -> Table | None:
    """Form of tables 15 and 16 of the DP-FedSOFIM paper; None for one method, or an objective other than accuracy."""
    study = results.study
    if len(study.methods) < 2 or study.objective_spec is not ACCURACY:
        return None
    seeds, name = study.seeds.confirm, study.reference.shown
    facts = results.facts(setting)
    rows = facts.test_rows if facts else None
    references, others = against_reference(results, setting)
    ours = {key: _evaluated(cell) for key, cell in references.items()}
    found = {c.name: _compared(ours[c.epsilon, c.variant.name], _evaluated(c), rows) for c in others}
    tested = {cell: test.p for cell, test in found.items() if test}
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    groups = []
    for epsilon in study.epsilons:
        here = [cell for cell in references.values() if cell.epsilon == epsilon]
        accuracies = ", ".join(f"{method_name(cell, results)} {_accuracy(_evaluated(cell))} %" for cell in here)
        lines = [(c, _row(c, found[c.name], corrected.get(c.name))) for c in others if c.epsilon == epsilon]
        groups.append((f"{budget(epsilon)}: {accuracies}", lines))
    if study.private:
        models = "of the published models"
    else:
        models = f"seed {seeds[0]}" if len(seeds) == 1 else f"over all {len(seeds)} confirm seeds that both have"
    elsewhere = "; see the differences over seeds for that" if len(seeds) > 1 else ""
    caption = (
        f"{name} against each other method on the{f' {rows}' if rows else ''} test rows after the last round, {models}."
        f" n10: rows that {name} has right and the other wrong, summed over the seeds; n01: the reverse. χ² is "
        "continuity-corrected, and a row counts as one observation regardless of the number of seeds. "
        f"Sign: {name} is better (+), worse (-) or equal (=). p (Holm) is corrected for {comparisons(len(corrected))} "
        f"of this table and bold below {SIGNIFICANCE}. The test asks whether these trained models differ on rows like "
        f"these, not whether training again with other seeds would show the same{elsewhere}."
    )
    common = {"reference": name, "test_rows": rows}
    records = [
        (c, {**common, **_record(_evaluated(c), ours[c.epsilon, c.variant.name], found[c.name], corrected.get(c.name))})
        for c in others
    ]
    return cell_table(
        results,
        setting,
        title=f"McNemar's test, {name} against the other methods",
        summary=f"Whether {name} differs significantly from each other method on the test rows.",
        caption=[caption, *unfinished(results.of(setting))],
        columns=dict.fromkeys(["Accuracy (%)", "n10", "n01", "χ²", "p", "p (Holm)", "Sign"], "r"),
        groups=groups,
        records=records,
        fields=(
            *("reference", "seeds", "test_rows", "reference_accuracy", "accuracy"),
            *("n10", "n01", "chi2", "p", "p_holm", "reference_is"),
        ),
    )


def _evaluated(cell: CellResult) -> EvaluatedRuns:
    return {seed: row for seed, row in cell.confirm.items() if row.state == "done" and row.correct}


def _compared(ours: EvaluatedRuns, theirs: EvaluatedRuns, rows: int | None) -> Comparison | None:
    both = [(ours[seed].correct, theirs[seed].correct) for seed in ours if seed in theirs]
    return Comparison.of(both, rows) if both else None


def _mean(runs: EvaluatedRuns) -> float | None:
    accuracies = [row.accuracy for row in runs.values() if row.accuracy is not None]
    return fmean(accuracies) if accuracies else None


def _accuracy(runs: EvaluatedRuns) -> str:
    mean = _mean(runs)
    return NOTHING if mean is None else f"{mean:.2f}"


def _row(cell: CellResult, found: Comparison | None, corrected: float | None) -> list[str]:
    accuracy = _accuracy(_evaluated(cell))
    if found is None or corrected is None:
        return [accuracy, *[NOTHING] * 6]
    counts = [str(found.n10), str(found.n01), f"{found.chi2:.3f}"]
    return [accuracy, *counts, shown_p(found.p), bold_if_significant(corrected), found.sign]


def _record(
    theirs: EvaluatedRuns, ours: EvaluatedRuns, found: Comparison | None, corrected: float | None
) -> dict[str, object]:
    record: dict[str, object] = {
        "seeds": " ".join(str(seed) for seed in ours if seed in theirs and seed != SECRET),
        "reference_accuracy": _mean(ours),
        "accuracy": _mean(theirs),
    }
    if found is None:
        return record
    test = {name: getattr(found, name) for name in ("n10", "n01", "chi2", "p")}
    return {**record, **test, "p_holm": corrected, "reference_is": SIGN_WORDS[found.sign]}
