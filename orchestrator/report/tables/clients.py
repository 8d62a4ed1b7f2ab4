"""How accuracy differs between the clients."""

from __future__ import annotations

from statistics import fmean, median

from orchestrator.report.tables.common import by_budget, cell_table, unfinished
from orchestrator.report.tables.render import NOTHING, Table
from orchestrator.results.clients import worst_tenth
from orchestrator.results.winners import CellResult, Results


def clients(results: Results, setting: str) -> Table | None:
    """None where the data set does not name the clients of the test rows."""
    cells = results.of(setting)
    found = {cell.name: results.by_client(cell) for cell in cells}
    if not any(found.values()):
        return None
    caption = (
        "Test accuracy (%) by client after the last round: every client's accuracy is the mean over the confirm runs. "
        "The worst tenth are the clients with the lowest accuracy. The CSV file lists every client. For the analyst, "
        "not for publication: accuracies of single clients are not private."
    )

    def row(cell: CellResult) -> list[str]:
        shares = [one.accuracy for one in found[cell.name]]
        if not shares:
            return [NOTHING] * 6
        tenth = fmean(one.accuracy for one in worst_tenth(found[cell.name]))
        means = [f"{value:.2f}" for value in (fmean(shares), median(shares), tenth, shares[0])]
        return [str(len(shares)), *means, str(found[cell.name][0].test_rows)]

    return cell_table(
        results,
        setting,
        title="Accuracy by client",
        summary="How accuracy differs between the clients, and the clients that are served worst.",
        caption=[caption, *unfinished(cells)],
        columns=dict.fromkeys(["Clients", "Mean", "Median", "Worst tenth", "Worst client", "Its test rows"], "r"),
        groups=by_budget(results, setting, row),
        records=[(cell, vars(one)) for cell in cells for one in found[cell.name]],
        fields=("client", "train_rows", "test_rows", "accuracy"),
    )
