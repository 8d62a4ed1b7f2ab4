"""What a study publishes, and about which records.

A private search publishes its winners. Everything else in a results folder is for the analyst.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.results.winners import CellResult, Results
from orchestrator.search.strategies.private import mean_runs, priced
from orchestrator.study.study import Study
from trainables.privacy.private_selection import Search
from trainables.privacy.publication import Publication, total_epsilon


def search_of(cell: CellResult, study: Study) -> Search | None:
    """The private search of a cell as input of the privacy account; None if it has not begun."""
    worst = cell.search.worst_epsilon
    if worst is None:
        return None
    mean = mean_runs(study.search.trials, cell.method.space())
    return priced(worst, cell.epsilon, mean, study.privacy.delta, study.search.private)


def publication_of(cell: CellResult, study: Study) -> Publication | None:
    """What the private search of a cell publishes; None if it has not begun. A search without a winner counts, too: it
    publishes that there is none."""
    search = search_of(cell, study)
    return None if search is None else Publication(study.privacy.level, study.privacy.adjacency, searches=(search,))


def total_of(cells: Iterable[CellResult], study: Study) -> float:
    """eps of publishing the private searches of these cells, which must be about the same records."""
    published = [one for cell in cells if (one := publication_of(cell, study))]
    return total_epsilon(published, study.privacy.level, study.privacy.delta)


def sharing_records(results: Results, setting: str) -> list[CellResult]:
    """The cells of a study that use the records of a setting, in any partition or data file."""
    here = {results.records.get(cell.cell_id.data) for cell in results.of(setting)}
    return [cell for cell in results.cells if results.records.get(cell.cell_id.data) in here]
