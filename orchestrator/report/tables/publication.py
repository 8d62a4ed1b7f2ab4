"""What may be published, and its privacy cost: sentences in the caption of every table and in their README."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.report.tables.render import Table, rounded_up
from orchestrator.results.publications import sharing_records, total_of
from orchestrator.results.winners import CellResult, Results
from trainables.privacy.publication import ANALYST_ONLY, simulated_note


def with_price(results: Results, table: Table, setting: str | None = None) -> Table:
    """The table with the cost of publishing it in its caption, or with the remark that it is for the analyst. Without
    a setting, the cost is given for all records of the study."""
    if not results.study.private:
        return replace(table, note=ANALYST_ONLY)
    return replace(table, caption=" ".join([table.caption, *sentences(results, setting)]).strip())


def sentences(results: Results, setting: str | None = None) -> list[str]:
    if not results.study.private:
        return [ANALYST_ONLY]
    return [
        "The tables, figures, report and best.yaml of this folder may be published; the ledger, the log and the output "
        "of commands may not.",
        *prices(results, setting),
        *filter(None, [simulated_note(results.study.partitions)]),
    ]


def prices(results: Results, setting: str | None = None) -> list[str]:
    """What a private study costs in total, a sentence for each set of records; nothing for other studies."""
    if not results.study.private:
        return []
    groups = {tuple(cell.name for cell in cells): cells for cells in _groups(results, setting)}
    return [_price(cells, results) for cells in groups.values()]


def _groups(results: Results, setting: str | None) -> list[list[CellResult]]:
    return [sharing_records(results, name) for name in (results.settings if setting is None else (setting,))]


def _price(cells: list[CellResult], results: Results) -> str:
    begun = [cell for cell in cells if cell.search.worst_epsilon is not None]
    names = ", ".join(dict.fromkeys(cell.setting for cell in cells))
    total, delta = rounded_up(total_of(cells, results.study)), results.study.privacy.delta
    return (
        f"Everything published about the records of {names} costs ε = {total} at δ = {delta:g}: "
        f"{len(begun)} private {'search' if len(begun) == 1 else 'searches'} together, also those without a winner."
    )
