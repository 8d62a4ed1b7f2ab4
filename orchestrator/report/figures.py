"""Figures, from the ledger alone: the score by round, and by the number of clients where a study varies it.

Drawn again they are the same files, byte for byte: nothing in them depends on the day or the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.report.tables.common import budget
from orchestrator.report.tables.results import CellResult, Results, Score
from orchestrator.results.ledger import Ledger
from trainables.data import simulated

if TYPE_CHECKING:  # takes a second to import, and only this command needs it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP*X"
PANEL = (4.0, 3.2)  # inches
MOST_COLUMNS = 3
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "fedsweep",  # else its names are random
    "svg.fonttype": "none",
}
METADATA: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}


@dataclass(frozen=True)
class Panel:
    """What one pair of axes shows: some cells under a common title."""

    title: str
    cells: list[CellResult]


def write_figures(folder: Path) -> list[Path]:
    """Write figures/ into a result folder; the paths of all files written."""
    with Ledger.read(folder) as ledger:
        results = Results.read(ledger)
    written: list[Path] = []
    for name, panels, draw in (
        ("score-by-round", _panels(results, _setting), _by_round),
        ("score-by-clients", [p for p in _panels(results, _family) if len(_counts(p.cells)) > 1], _by_clients),
    ):
        if panels:
            written += _save(_figure(results, panels, draw), folder / "figures", name)
    return written


# ---- which cells belong together


def _setting(cell: CellResult) -> str:
    simulation = _simulation(cell)
    if simulation is None:
        return cell.setting
    return f"{_family(cell)}, {simulation.clients} clients"


def _family(cell: CellResult) -> str:
    """A simulation without its number of clients, or any other setting as it is."""
    simulation = _simulation(cell)
    if simulation is None:
        return cell.setting
    return f"{simulation.task}, {simulation.sizes} sizes around {simulation.mean_size}"


def _simulation(cell: CellResult) -> simulated.Simulation | None:
    return simulated.parse(cell.data.source, 0) if cell.data else None


def _counts(cells: Sequence[CellResult]) -> list[int]:
    return sorted({_clients(cell) for cell in cells if cell.confirm})


def _clients(cell: CellResult) -> int:
    return next(iter(cell.confirm.values())).trial.problem.partition.clients


def _panels(results: Results, title: Callable[[CellResult], str]) -> list[Panel]:
    """Cells under the same title and budget, in the order of the tables."""
    found: dict[tuple[str, float], list[CellResult]] = {}
    for cell in results.cells:
        if cell.curve:
            found.setdefault((title(cell), cell.epsilon), []).append(cell)
    several = len(results.study.epsilons) > 1
    return [Panel(f"{name}, {budget(epsilon)}" if several else name, cells) for (name, epsilon), cells in found.items()]


# ---- drawing


def _figure(results: Results, panels: Sequence[Panel], draw: Callable[[Axes, Panel, str, dict], None]) -> Figure:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    objective, methods = results.study.judged_by, [method.shown for method in results.study.methods]
    columns = min(MOST_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    with pyplot.rc_context(STYLE):
        size = (PANEL[0] * columns, PANEL[1] * rows + 0.4)
        figure, grid = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", sharey="row")
        for axes, panel in zip(grid.flat, panels, strict=False):
            for number, method in enumerate(methods):
                look = {"color": f"C{number % 10}", "marker": MARKERS[number % len(MARKERS)]}
                draw(axes, panel, method, look)
            axes.set_title(panel.title)
            if objective.lower_is_better:
                axes.set_yscale("log")
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel(f"{objective.final}{objective.unit}")
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
        return figure


def _by_round(axes: Axes, panel: Panel, method: str, look: dict[str, str]) -> None:
    """A line per method; the band is one standard error of the mean over seeds."""
    for cell in _of(panel, method):
        curve = cell.curve
        _line(axes, list(curve), list(curve.values()), method, {**look, "markevery": max(1, len(curve) // 8)})
    axes.set_xlabel("round")
    if max(t for cell in panel.cells for t in cell.curve) > 10 * min(t for cell in panel.cells for t in cell.curve):
        axes.set_xscale("log")


def _by_clients(axes: Axes, panel: Panel, method: str, look: dict[str, str]) -> None:
    """The last round of every cell, over the number of its clients."""
    cells = sorted((cell for cell in _of(panel, method) if cell.last in cell.curve), key=_clients)
    _line(axes, [_clients(cell) for cell in cells], [cell.curve[cell.last] for cell in cells], method, look)
    axes.set_xlabel("clients")
    axes.set_xticks(_counts(panel.cells))


def _of(panel: Panel, method: str) -> Iterator[CellResult]:
    return (cell for cell in panel.cells if cell.method.shown == method)


def _line(axes: Axes, x: list[int], scores: list[Score], label: str, look: dict[str, Any]) -> None:
    mean = [score.mean for score in scores]
    error = [0.0 if score.seeds < 2 else score.std / score.seeds**0.5 for score in scores]
    axes.plot(x, mean, label=label, markersize=4, linewidth=1.3, **look)
    low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
    axes.fill_between(x, low, high, alpha=0.15, color=look["color"], linewidth=0)


def _save(figure: Figure, folder: Path, name: str) -> list[Path]:
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{ending}" for ending in METADATA]
    with pyplot.rc_context(STYLE):
        for path in paths:
            figure.savefig(path, dpi=150, metadata=METADATA[path.suffix[1:]])
    pyplot.close(figure)
    return paths
