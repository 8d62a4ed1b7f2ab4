"""tables/README.md: the final scores and an index of all tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.report.tables.accuracy import final_accuracy
from orchestrator.report.tables.common import LOST, unfinished
from orchestrator.report.tables.publication import sentences
from orchestrator.report.tables.render import Table, markdown_rows, markdown_text
from orchestrator.results.winners import Results

FILES = """\
The CSV files hold the same numbers unrounded, one observation per line. [trials.csv](trials.csv) lists every trial with
its hyperparameters and its state, [seeds.csv](seeds.csv) every confirm run by round, and
[trade-off.csv](trade-off.csv) the error rates of the best test for the presence of a record. The LaTeX files are for
`\\input` in a document with `\\usepackage{booktabs}`. [best.yaml](../best.yaml) holds the chosen configurations for
`fedsweep train --from`, and [timing](../timing/) the seconds per round. Everything is computed from the ledger;
`fedsweep tables` builds it again.
"""
PRIVATE_FILES = """\
This is a private search. tables/, figures/, timing/, report.html and best.yaml contain only winners. The ledger and
the log contain every run, its score and the secret of all noise: keep them private. The CSV files hold the same numbers
as the tables, unrounded. [best.yaml](../best.yaml) holds the chosen configurations. `fedsweep tables` builds everything
again.
"""
SEARCH = """\
- Every cell is **searched** on a validation split. The best configurations may be compared again on fresh seeds
  (**contest**). The winner is then trained with several other seeds and evaluated on the test set (**confirm**), which
  the search never uses.
"""
PRIVATE_SEARCH = """\
- Every cell is **searched** on a validation split, with noisy scores. The winner itself is then evaluated on the test
  set (**confirm**), which the search never uses.
"""
TERMS = """\
- **ε** is the privacy budget: a smaller ε means more privacy and more noise. ε = ∞ is training without noise.
- A **cell** is one method at one budget in one setting (data, backbone, partition of the data over the clients).
{search}\
- A trial ends as *done*, *diverged* (its weights became infinite), or *failed* (it could not run).
"""


@dataclass(frozen=True)
class Entry:
    """A written table."""

    setting: str
    stem: str
    table: Table


def page(results: Results, entries: Sequence[Entry]) -> str:
    parts = [f"# Results of study {markdown_text(results.study.name)}\n"]
    if results.study.description:
        parts.append(f"Study: {markdown_text(results.study.description)}\n")
    parts.append(f"{_progress(results)}\n")
    whole = [] if results.study.private else ["The same holds for every file of this folder, CSV files included."]
    parts.append(f"**Publication.** {markdown_text(' '.join([*sentences(results), *whole]))}\n")
    if results.settings:
        parts.append(f"## {results.study.objective_spec.test_title} after the last round\n")
    for setting in results.settings:
        final = final_accuracy(results, setting)
        parts.append(f"### {markdown_text(setting)}\n\n{markdown_text(final.caption)}\n\n{markdown_rows(final)}")
    if entries:
        parts.append("## All tables\n")
    for setting in results.settings:
        lines = [_line(entry) for entry in entries if entry.setting == setting]
        parts.append(f"### {markdown_text(setting)}\n\n{''.join(lines)}")
    files, search = (PRIVATE_FILES, PRIVATE_SEARCH) if results.study.private else (FILES, SEARCH)
    parts += [files, f"## Terms\n\n{TERMS.format(search=search)}"]
    return "\n".join(parts)


def _line(entry: Entry) -> str:
    stem = entry.stem
    return f"- [{stem}]({stem}.md) ([CSV]({stem}.csv), [LaTeX]({stem}.tex)): {markdown_text(entry.table.summary)}\n"


def _progress(results: Results) -> str:
    ended = results.states.total()
    lost = ", ".join(f"{results.states[state]} {state}" for state in LOST if results.states[state])
    what = f"of {len(results.cells)} winners are known" if results.study.private else "trials have finished"
    counted = f"{ended} {what}{f' ({lost})' if lost else ''}."
    if not results.cells:
        return f"{counted} Nothing has been started yet."
    return " ".join([counted, *(unfinished(results.cells) or ["The study is finished."])])
