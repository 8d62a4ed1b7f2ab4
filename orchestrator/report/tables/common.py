"""What several tables share: the names of cells, how scores are printed, and the layout with one row per cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import pandas as pd

from orchestrator.report.tables.render import NOTHING, Bold, Group, Table
from orchestrator.results.frames import NAMES, names
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import CellResult, Results, Score
from orchestrator.search.objective import Objective
from orchestrator.study.study import Study

LOST = ("diverged", "failed")
"""How a trial can end before its last round."""
UNKNOWN = Score(math.nan, math.nan, 0)
"""The score of a cell without one."""

T = TypeVar("T")
CellRow = tuple[CellResult, Sequence[str]]
CellRecord = tuple[CellResult, Mapping[str, object]]


def method_name(cell: CellResult, results: Results) -> str:
    """The method, with the search strategy if the study has several."""
    return f"{cell.method.shown} ({cell.variant.name})" if results.several_strategies else cell.method.shown


def short_name(cell: CellResult, results: Results) -> str:
    """The name of a cell without its setting, for notes."""
    return f"{method_name(cell, results)} at {budget(cell.epsilon)}"


def budget(epsilon: float) -> str:
    return "ε = ∞" if math.isinf(epsilon) else f"ε = {epsilon:g}"


def cell_table(
    results: Results,
    setting: str,
    *,
    title: str,
    summary: str,
    caption: Iterable[str],
    columns: Mapping[str, str],
    groups: Iterable[tuple[str, Iterable[CellRow]]],
    records: Iterable[CellRecord],
    fields: Sequence[str] = (),
) -> Table:
    """A table with one row per cell; the first columns name the method and, if there are several, the strategy.

    `columns`: alignment by heading. `records`: the lines of the CSV file, to which the names of the cell are added.
    `fields`: the keys of the records, which a table without records needs for its header.
    """
    lead = {"Method": "l", "Search": "l"} if results.several_strategies else {"Method": "l"}
    columns = {**lead, **columns}
    return Table(
        title=f"{title}: {setting}",
        summary=summary,
        caption=" ".join(caption),
        columns=list(columns),
        align="".join(columns.values()),
        groups=[
            Group(heading, [[*(cell.method.shown, cell.variant.name)[: len(lead)], *row] for cell, row in rows])
            for heading, rows in groups
        ],
        data=pd.DataFrame(
            [{**names(cell), **record} for cell, record in records], columns=[*NAMES, *fields] if fields else None
        ),
    )


def by_budget(
    results: Results, setting: str, row: Callable[[CellResult], Sequence[str]]
) -> list[tuple[str, list[CellRow]]]:
    """A group of rows per budget."""
    epsilons = results.study.epsilons
    return [(budget(epsilon), [(cell, row(cell)) for cell in results.of(setting, epsilon)]) for epsilon in epsilons]


def data_fingerprints(ledger: Ledger, study: Study) -> dict[str, str]:
    """Fingerprints by the data set's name in tables. Empty for a private search: a hash of the data would reveal
    records."""
    known = {} if study.private else ledger.fingerprints()
    return {data.shown: known[data.id] for data in study.data if data.id in known}


def mean_and_std(score: Score, objective: Objective) -> str:
    if math.isnan(score.mean):
        return NOTHING
    mean = objective.format(score.mean)
    return mean if math.isnan(score.std) else f"{mean} ± {objective.format(score.std)}"


def spread(results: Results) -> str:
    """What the two numbers around ± are."""
    seeds, partition = results.study.seeds.confirm, results.study.seeds.partition
    if results.study.private:
        return "the single published run, with secret noise"
    if len(seeds) == 1:
        return f"a single seed ({seeds[0]})"
    over = "" if isinstance(partition, int) else ", each with its own partition"
    if isinstance(partition, list):
        over = f" and {min(len(partition), len(seeds))} partitions"
    shown = ", ".join(map(str, seeds))
    return f"mean ± sample standard deviation (ddof = 1) over {len(seeds)} seeds ({shown}){over}"


def bold_best(texts: Sequence[str], values: Sequence[float | None], objective: Objective) -> list[str]:
    """The texts, bold for the best value and every value that is printed as the same number. No text is bold if fewer
    than two values are known."""
    rounded = [None if value is None else float(objective.format(value)) for value in values]
    known = [value for value in rounded if value is not None]
    if len(known) < 2:
        return list(texts)
    best = min(known, key=objective.cost)
    return [Bold(text) if value == best else text for text, value in zip(texts, rounded, strict=True)]


def thinned(values: Iterable[T], most: int) -> list[T]:
    """At most `most` of the values, evenly spaced and including the last."""
    found = list(values)
    step = math.ceil(len(found) / most)
    return found[::-1][::step][::-1] if found else []


def unfinished(cells: Iterable[CellResult]) -> list[str]:
    """One sentence if trials are still to run, otherwise none."""
    if not (count := missing_text(list(cells))):
        return []
    return [f"The study is unfinished: {count} {'trial is' if count.split()[-1] == '1' else 'trials are'} missing."]


def missing_text(cells: Sequence[CellResult]) -> str:
    """How many trials are still to run; empty if none."""
    if not (count := sum(cell.search.missing for cell in cells)):
        return ""
    if not any(cell.search.more_to_come for cell in cells):
        return str(count)
    return f"{'at least' if cells[0].study.private else 'about'} {count}"  # a private search hides its number of trials
