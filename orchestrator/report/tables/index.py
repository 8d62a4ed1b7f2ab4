"""tables/README.md: where to begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.report.tables.accuracy import final_accuracy
from orchestrator.report.tables.common import LOST, unfinished
from orchestrator.report.tables.render import Table, markdown_rows, markdown_text
from orchestrator.results.winners import Results

ELSEWHERE = """\
The CSV files hold the same numbers unrounded, one observation per line; [trials.csv](trials.csv) has every trial with
its hyperparameters and how it ended, [seeds.csv](seeds.csv) every confirm run round by round,
[trade-off.csv](trade-off.csv) how well anyone could tell whether a record was there. The LaTeX files are for
`\\input` in a document with `\\usepackage{booktabs}`. The chosen configurations are in [best.yaml](../best.yaml), ready
for `fedsweep train --from`; seconds per round are in [timing](../timing/). All of this is computed from the ledger, and
`fedsweep tables` builds it again.
"""
PUBLISHED = """\
This is a private search: what stands in tables/, figures/, timing/, report.html and best.yaml is of the winners alone
and may be published, at the price that the privacy table prints as ε with search. The ledger and the log hold every
run, its score and the secret that all noise follows from: show them to nobody. The CSV files hold the same numbers as
the tables unrounded; the chosen configurations are in [best.yaml](../best.yaml). `fedsweep tables` builds it all again.
"""
SEARCHED = """\
- Every cell is **searched** on a validation split; the best configurations may meet again there, on fresh seeds
  (**contest**); the winner is then trained anew with several seeds and judged on the test set (**confirm**), which the
  search never sees.
"""
SEARCHED_PRIVATELY = """\
- Every cell is **searched** on a validation split, with noisy scores; the winner itself is then judged on the test set
  (**confirm**), which the search never sees.
"""
WORDS = f"""\
- **ε** is the privacy budget: the smaller, the more private, and the more noise. ε = ∞ is training without noise.
- A **cell** is one method at one budget in one setting (data, backbone, partition of the data over the clients).
{SEARCHED}\
- A trial can end as *done*, *diverged* (its weights became infinite), or *failed* (it could not run).
"""


@dataclass(frozen=True)
class Entry:
    """A table that has been written."""

    setting: str
    stem: str
    table: Table


def page(results: Results, entries: Sequence[Entry]) -> str:
    parts = [f"# Results of study {markdown_text(results.study.name)}\n"]
    if results.study.description:
        parts.append(f"Study: {markdown_text(results.study.description)}\n")
    parts.append(f"{_progress(results)}\n")
    if results.settings:
        parts.append(f"## {results.study.judged_by.final}, at the end\n")
    for setting in results.settings:
        final = final_accuracy(results, setting)
        parts.append(f"### {markdown_text(setting)}\n\n{markdown_text(final.caption)}\n\n{markdown_rows(final)}")
    if entries:
        parts.append("## All tables\n")
    for setting in results.settings:
        lines = [_line(entry) for entry in entries if entry.setting == setting]
        parts.append(f"### {markdown_text(setting)}\n\n{''.join(lines)}")
    parts.append(PUBLISHED if results.study.private else ELSEWHERE)
    words = WORDS.replace(SEARCHED, SEARCHED_PRIVATELY) if results.study.private else WORDS
    parts.append(f"## Words\n\n{words}")
    return "\n".join(parts)


def _line(entry: Entry) -> str:
    stem = entry.stem
    return f"- [{stem}]({stem}.md) ([CSV]({stem}.csv), [LaTeX]({stem}.tex)): {markdown_text(entry.table.summary)}\n"


def _progress(results: Results) -> str:
    ended = results.states.total()
    lost = [f"{results.states[state]} {state}" for state in LOST if results.states[state]]
    what = f"of {len(results.cells)} winners are known" if results.study.private else "trials have ended"
    counted = f"{ended} {what}{' (' + ', '.join(lost) + ')' if lost else ''}."
    if not results.cells:
        return f"{counted} Nothing has been started yet."
    return " ".join([counted, *(unfinished(results.cells) or ["The study is finished."])])
