"""Figures from the ledger: the score by round, by privacy budget, and by the number of clients if a study varies it.
Where the data set names the client of every test row, also the accuracy by client.

The same ledger gives the same files, byte for byte: nothing in them depends on the date or the process.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.report import palette
from orchestrator.report.tables.common import budget
from orchestrator.report.tables.publication import sentences
from orchestrator.report.tables.render import endings
from orchestrator.results.clients import worst_tenth
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import CellResult, Results, Score
from orchestrator.search.objective import ACCURACY
from trainables.data import simulated
from trainables.files import replacing, subfolder

if TYPE_CHECKING:  # slow to import, and needed for drawing only
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PANEL = (2.9, 2.3)  # inches; two columns stay readable at half a page width
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.handlelength": 3,  # long enough to show dashes
    "text.parse_math": False,  # names are not formulas
    "svg.hashsalt": "fedsweep",  # reproducible ids
    "svg.fonttype": "none",
}
METADATA: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
LEGEND_ENTRY = (0.75, 0.2)  # inches: width of an entry without its label, height of a line
LEGEND_ABOVE = 5  # lines; a taller legend is placed to the right of the panels
LEGEND_BESIDE = 5.5  # inches; a taller legend to the right gets another column
LABEL_LETTERS = 36  # letters per line of a label
TITLE_INCHES = 0.078  # width of a letter of a panel title
LOG_FROM = 10.0  # use a logarithmic axis if the methods' numbers of rounds differ by this factor


@dataclass(frozen=True)
class Panel:
    """The cells drawn in one pair of axes, under a common title."""

    title: str
    cells: list[CellResult]


@dataclass(frozen=True)
class Drawing:
    """A figure with one pair of axes per panel."""

    name: str
    panels: list[Panel]
    draw: Callable[[Axes, Panel, Series], None]


@dataclass(frozen=True)
class Series:
    """A method with one search strategy: its legend entry and look, the same in every panel."""

    method: str
    strategy: str
    label: str
    number: int
    variant: int
    spread: float
    """Horizontal offset of points, from -1 to 1, so that whiskers do not overlap."""

    @property
    def look(self) -> dict[str, Any]:
        look = palette.look(self.number, self.variant)
        dashes = palette.DASHES[look.dash]
        return {
            "color": palette.ON_LIGHT[look.colour],
            "marker": palette.MARKERS[look.marker],
            "linestyle": (0, dashes) if dashes else "-",
            **({"markerfacecolor": "white"} if look.hollow else {}),
        }

    def of(self, panel: Panel) -> Iterator[CellResult]:
        return (cell for cell in panel.cells if cell.method.shown == self.method and cell.variant.name == self.strategy)


def write_figures(folder: Path) -> list[Path]:
    """Write figures/ into a results folder; return the paths of all files written."""
    with Ledger.read(folder) as ledger:
        results = Results.read(ledger)
    note = " ".join(sentences(results))
    return [
        path
        for drawing in drawings(results)
        for path in _save(_figure(results, drawing), subfolder(folder, "figures"), drawing.name, note)
    ]


def drawings(results: Results) -> list[Drawing]:
    """All figures of a study. The score by round has one figure per setting, with a panel per budget. In a study with a
    single budget it has one figure, with a panel per setting."""
    by_setting, several = _panels(results.cells, _setting), len(results.study.epsilons) > 1
    if several:
        found = [
            Drawing(f"score-by-round{ending}", _panels(results.of(setting), lambda c: budget(c.epsilon)), _by_round)
            for setting, ending in endings(results.settings).items()
        ]
        found.append(Drawing("score-by-epsilon", by_setting, _by_epsilon))
    else:
        found = [Drawing("score-by-round", by_setting, _by_round)]
    families = _panels(results.cells, lambda c: f"{_family(c)}, {budget(c.epsilon)}" if several else _family(c))
    varied = [panel for panel in families if len(_counts(panel.cells)) > 1]
    found.append(Drawing("score-by-clients", varied, _by_clients))
    for setting, ending in endings(results.settings).items():
        known = [cell for cell in results.of(setting) if results.by_client(cell)]
        panels = _panels(known, lambda cell: budget(cell.epsilon))
        found.append(Drawing(f"accuracy-by-client{ending}", panels, partial(_by_client, results)))
    return [drawing for drawing in found if drawing.panels]


# ---- panels and series


def _panels(cells: Sequence[CellResult], title: Callable[[CellResult], str]) -> list[Panel]:
    """Cells grouped by title, in the order of the tables."""
    found: dict[str, list[CellResult]] = {}
    for cell in cells:
        if cell.curve:
            found.setdefault(title(cell), []).append(cell)
    return [Panel(name, members) for name, members in found.items()]


def _setting(cell: CellResult) -> str:
    simulation = _simulation(cell)
    return cell.setting if simulation is None else f"{_family(cell)}, {simulation.clients} clients"


def _family(cell: CellResult) -> str:
    """The name of the setting; for simulated data, without the number of clients."""
    simulation = _simulation(cell)
    if simulation is None:
        return cell.setting
    return f"{simulation.task}, {simulation.sizes} sizes around {simulation.mean_size}"


def _simulation(cell: CellResult) -> simulated.Simulation | None:
    return simulated.parse(cell.data.source, 0)


def _counts(cells: Sequence[CellResult]) -> list[int]:
    return sorted({_clients(cell) for cell in cells if cell.confirm})


def _clients(cell: CellResult) -> int:
    return next(iter(cell.confirm.values())).trial.problem.partition.clients


def _all_series(results: Results) -> list[Series]:
    study = results.study
    keys = [(m, v) for m in range(len(study.methods)) for v in range(len(study.variants))]
    found = []
    for place, (number, variant) in enumerate(keys):
        method, strategy = study.methods[number].shown, study.variants[variant].name
        label = _wrapped(f"{method} ({strategy})" if results.several_strategies else method, LABEL_LETTERS)
        spread = (2 * place / (len(keys) - 1) - 1) * min(1, len(keys) / 8) if len(keys) > 1 else 0.0
        found.append(Series(method, strategy, label, number, variant, spread))
    return found


# ---- drawing


def load_matplotlib() -> None:
    """Import matplotlib with / as the current folder. It would otherwise read a matplotlibrc in the user's current
    folder, which other people may have written. If that file switches on LaTeX, a label can include any file."""
    with contextlib.chdir("/"):
        import matplotlib
    matplotlib.use("Agg")


def _figure(results: Results, drawing: Drawing) -> Figure:
    load_matplotlib()
    from matplotlib import pyplot

    objective = ACCURACY if isinstance(drawing.draw, partial) else results.study.objective_spec
    panels, series = drawing.panels, _all_series(results)
    columns = min(len(panels), 2 if len(panels) <= 4 else 3)
    rows = -(-len(panels) // columns)
    width = max(PANEL[0] * columns, 3.4)
    with pyplot.rc_context(STYLE):
        legend = _legend(series, width, PANEL[1] * rows)
        size = (width + legend.beside, max(PANEL[1] * rows, legend.height) + legend.above + 0.35)
        figure, grid = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", sharey="row")
        handles: dict[str, Any] = {}
        for axes, panel in zip(grid.flat, panels, strict=False):
            for one in series:
                drawing.draw(axes, panel, one)
            axes.set_title(_wrapped(panel.title, int(width / columns / TITLE_INCHES)))
            if objective.lower_is_better:
                axes.set_yscale("log")
                plain_ticks(axes.yaxis)
            handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel(f"{objective.test_title}{objective.unit}")
        shown = [one.label for one in series if one.label in handles]
        figure.legend([handles[label] for label in shown], shown, loc=legend.place, ncols=legend.columns)
        figure.supxlabel(_spread_note(results, drawing), fontsize=7.5, color="#555555")
        return figure


@dataclass(frozen=True)
class _Legend:
    """The place of a legend, its number of columns, and its size in inches: the height that it adds above the panels,
    or the width that it adds beside them and its height there."""

    place: str
    columns: int
    above: float = 0.0
    beside: float = 0.0
    height: float = 0.0


def _legend(series: Sequence[Series], width: float, height: float) -> _Legend:
    """Place the legend above the panels, in as many columns as fit, or to their right if it would be too tall."""
    from matplotlib.textpath import TextPath

    longest = max(TextPath((0, 0), one.label, size=STYLE["legend.fontsize"]).get_extents().width for one in series)
    entry = LEGEND_ENTRY[0] + longest / 72
    lines = [one.label.count("\n") + 1 for one in series]
    columns = max(1, min(len(series), int(width / entry)))
    if (rows := max(lines) * -(-len(series) // columns)) <= LEGEND_ABOVE:
        return _Legend("outside upper center", columns, above=LEGEND_ENTRY[1] * rows)
    columns = math.ceil(sum(lines) * LEGEND_ENTRY[1] / max(height, LEGEND_BESIDE))
    rows = math.ceil(sum(lines) / columns) + columns - 1  # entries of several lines do not divide evenly
    return _Legend("outside right upper", columns, beside=entry * columns, height=LEGEND_ENTRY[1] * rows)


def plain_ticks(axis: Axis) -> None:
    """Plain numbers on a logarithmic axis: matplotlib's default labels are formulas, whose parsing is off."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _wrapped(title: str, most: int) -> str:
    """A long name on at most three lines."""
    import textwrap

    return "\n".join(textwrap.wrap(title, most)[:3])


def _spread_note(results: Results, drawing: Drawing) -> str:
    """What bands and whiskers show: the same as ± in the tables."""
    seeds = len(results.study.seeds.confirm)
    if isinstance(drawing.draw, partial):
        return f"A point: a client, mean over {seeds} seeds. Ring: the worst tenth. Not for publication"
    if seeds == 1:
        return "a single seed"
    mark = "Band" if drawing.draw is _by_round else "Whisker"
    return f"{mark}: ± one standard deviation over {seeds} seeds"


def _by_round(axes: Axes, panel: Panel, series: Series) -> None:
    for cell in series.of(panel):
        rounds, scores = list(cell.curve), list(cell.curve.values())
        every = max(1, len(rounds) // 8)
        offset = (len(rounds) - 1) % every  # so that the last point has a mark
        axes.plot(
            rounds, [s.mean for s in scores], label=series.label, markersize=4, linewidth=1.3,
            markevery=(offset, every), **series.look,
        )  # fmt: skip
        low, high = ([s.mean + sign * _deviation(s) for s in scores] for sign in (-1, 1))
        axes.fill_between(rounds, low, high, alpha=0.15, color=series.look["color"], linewidth=0)
    lasts = [max(cell.curve) for cell in panel.cells]
    if max(lasts) >= LOG_FROM * min(lasts):
        log_numbers(axes)
        axes.set_xlabel("round (logarithmic)")
    else:
        axes.set_xlabel("round")
        axes.locator_params(axis="x", integer=True, nbins=6)


def _by_epsilon(axes: Axes, panel: Panel, series: Series) -> None:
    """The score after the last round by budget, with budgets at equal distances."""
    epsilons = sorted({cell.epsilon for cell in panel.cells})
    _whiskers(axes, panel, series, lambda cell: epsilons.index(cell.epsilon), 0.18)
    axes.set_xticks(range(len(epsilons)), [budget(epsilon).removeprefix("ε = ") for epsilon in epsilons])
    axes.set_xlabel("ε")


def _by_clients(axes: Axes, panel: Panel, series: Series) -> None:
    """The score after the last round by number of clients."""
    counts = _counts(panel.cells)
    _whiskers(axes, panel, series, _clients, 0.12 * min(b - a for a, b in pairwise(counts)))
    axes.set_xlabel("clients")
    axes.set_xticks(counts)


def log_numbers(axes: Axes) -> None:
    """Make the x axis logarithmic, with plain numbers."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log")
    plain_ticks(axes.xaxis)
    axes.xaxis.set_minor_locator(NullLocator())


def _by_client(results: Results, axes: Axes, panel: Panel, series: Series) -> None:
    """Every client's accuracy by its number of train rows; rings mark the worst tenth."""
    for cell in series.of(panel):
        accuracies, colour = results.by_client(cell), series.look["color"]
        for marked, size, face in ((accuracies, 3, colour), (worst_tenth(accuracies), 6, "none")):
            axes.plot(
                [one.train_rows for one in marked], [one.accuracy for one in marked], linestyle="", markersize=size,
                marker="o", markeredgecolor=colour, markerfacecolor=face,
                label=series.label if face == colour else None,
            )  # fmt: skip
    log_numbers(axes)
    axes.set_xlabel("train rows of a client (logarithmic)")


def _whiskers(axes: Axes, panel: Panel, series: Series, place: Callable[[CellResult], int], apart: float) -> None:
    """The score of every cell after the last round, at x = `place(cell)`, shifted by up to `apart` for each series."""
    cells = sorted((cell for cell in series.of(panel) if cell.last in cell.curve), key=place)
    if cells:
        scores = [cell.curve[cell.last] for cell in cells]
        axes.errorbar(
            [place(cell) + apart * series.spread for cell in cells], [score.mean for score in scores],
            yerr=[_deviation(score) for score in scores], label=series.label, markersize=4, linewidth=1.3,
            elinewidth=0.9, capsize=1.5, **series.look,
        )  # fmt: skip


def _deviation(score: Score) -> float:
    return score.std if score.seeds > 1 else 0.0


def _save(figure: Figure, folder: Path, name: str, note: str) -> list[Path]:
    """`note`: stored in the files, not shown."""
    from matplotlib import pyplot

    paths = [folder / f"{name}.{ending}" for ending in METADATA]
    with pyplot.rc_context(STYLE), warnings.catch_warnings():
        # the warning would contain the character, which a terminal might interpret
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        for path in paths:
            with replacing(path) as file:
                ending = path.suffix[1:]
                figure.savefig(file, format=ending, dpi=200, metadata={**METADATA[ending], "Description": note})
    pyplot.close(figure)
    return paths
