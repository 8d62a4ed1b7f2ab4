"""Figures of ledgers written by hand: contents, layout, reproducibility."""

from dataclasses import replace

import pytest
import reported
from handmade_ledgers import LAST, study, writing

from orchestrator.report import figures
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results

MANY = ("dp-fedgd", "dp-fedavg", "dp-fedadam", "dp-fedyogi", "dp-ftrl", "dp-adafedprox", "dp-fedsofim", "dp-scaffold")


def fill(folder, of, methods=("dp-fedgd", "dp-fedadam"), strategies=("grid",), rounds=(10, LAST)):
    """Each method is one point better than the previous one; seeds are one apart."""
    with writing(folder, of) as writer:
        for epsilon in of.epsilons:
            for number, method in enumerate(methods):
                for strategy in strategies:
                    stage = "coarse" if strategy == "grid" else "optuna"
                    writer.search(method, epsilon, {stage: [({}, 60.0)]}, strategy=strategy)
                    curves = {seed: dict.fromkeys(rounds, 50.0 + number + seed) for seed in of.seeds.confirm}
                    writer.confirm(method, epsilon, {}, curves, strategy=strategy)


def drawn(folder):
    from matplotlib import pyplot

    with Ledger.read(folder) as ledger:
        results = Results.read(ledger)
    pyplot.close("all")
    return {drawing.name: figures._figure(results, drawing) for drawing in figures.drawings(results)}


def boxes(figure):
    """Positions of legend, titles and labels, and of the figure, in pixels."""
    figure.canvas.draw()
    parts = [*figure.legends, *(axes.title for axes in figure.axes if axes.get_visible()), figure._supxlabel]
    return [part.get_window_extent() for part in parts], figure.bbox


def check_that_nothing_is_cut_off(figure):
    parts, whole = boxes(figure)
    for part in parts:
        assert whole.x0 <= part.x0
        assert part.x1 <= whole.x1
        assert whole.y0 <= part.y0
        assert part.y1 <= whole.y1


def test_nothing_is_cut_off_with_many_methods_and_two_strategies(tmp_path):
    of = study(methods=list(MANY), search={"strategies": ["grid", "optuna"]}, epsilons=[0.5, 1, 5, 10])
    fill(tmp_path, of, MANY, ("grid", "optuna"))
    found = drawn(tmp_path)
    assert list(found) == ["score-by-round", "score-by-epsilon"]
    for figure in found.values():
        check_that_nothing_is_cut_off(figure)


def test_a_long_legend_is_right_of_the_panels(tmp_path):
    """Above them it would be taller than the panels."""
    labels = [f"Variant {number} with so long a name that no line holds it" for number in range(18)]
    with writing(
        tmp_path, study(methods=[{"dp-fedgd": {"label": x, "clip": 1 + n}} for n, x in enumerate(labels)], epsilons=[8])
    ) as writer:
        for label in labels:
            writer.confirm("dp-fedgd", 8, {}, {42: {LAST: 60.0}, 7: {LAST: 61.0}}, label=label)
    (figure,) = drawn(tmp_path).values()
    check_that_nothing_is_cut_off(figure)
    (axes,), (legend,) = figure.axes, figure.legends
    assert axes.get_window_extent().x1 <= legend.get_window_extent().x0
    assert axes.get_window_extent().width > 1.8 * figure.dpi, "the panel keeps its size"
    assert len({text.get_text() for text in legend.get_texts()}) == len(labels)


def test_a_short_legend_is_above_the_panels(tmp_path):
    fill(tmp_path, study())
    for figure in drawn(tmp_path).values():
        legend = figure.legends[0].get_window_extent()
        assert all(axes.get_window_extent().y1 <= legend.y0 for axes in figure.axes)


def test_two_strategies_look_different(tmp_path):
    fill(tmp_path, study(search={"strategies": ["grid", "optuna"]}), strategies=("grid", "optuna"))
    axes = drawn(tmp_path)["score-by-round"].axes[0]
    looks = {line.get_label(): (line.get_color(), str(line.get_linestyle()), line.is_dashed()) for line in axes.lines}
    assert list(looks) == ["DP-FedGD (grid)", "DP-FedGD (optuna)", "DP-FedAdam (grid)", "DP-FedAdam (optuna)"]
    assert len(set(looks.values())) == 4
    assert looks["DP-FedGD (grid)"][0] == looks["DP-FedGD (optuna)"][0], "a method keeps its colour"


def test_a_few_rounds_are_shown_on_a_plain_axis(tmp_path):
    """Twelve rounds, evaluated at each: no logarithms, and more than two ticks."""
    rounds = range(1, 13)
    fill(tmp_path, study(rounds={"coarse": LAST, "fine": LAST, "confirm": LAST}), rounds=(*rounds, LAST))
    for axes in drawn(tmp_path)["score-by-round"].axes:
        assert axes.get_xscale() == "linear"
        assert axes.get_xlabel() == "round"
        low, high = axes.get_xlim()
        assert sum(low <= tick <= high for tick in axes.get_xticks()) > 2


def test_a_logarithmic_axis_says_so(tmp_path):
    with writing(tmp_path, study(methods=["dp-fedgd", {"dp-fedadam": {"rounds": 2}}], epsilons=[8])) as writer:
        for method, curve in (("dp-fedgd", {1: 40.0, LAST: 55.0}), ("dp-fedadam", ("diverged", 3, {2: 50.0}))):
            writer.search(method, 8, {"coarse": [({}, 60.0)]})
            writer.confirm(method, 8, {}, {42: curve, 7: curve})
    (axes,) = drawn(tmp_path)["score-by-round"].axes
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "round (logarithmic)"


def test_a_logarithmic_score_has_plain_numbers():
    """Formula parsing is off, because names are not formulas."""
    from matplotlib import pyplot

    with pyplot.rc_context(figures.STYLE):
        figure, axes = pyplot.subplots()
        axes.set_yscale("log")
        axes.set_ylim(0.004, 0.2)
        figures.plain_ticks(axes.yaxis)
        figure.canvas.draw()
        shown = [label.get_text() for label in axes.get_yticklabels(which="both") if label.get_text()]
    assert {"0.005", "0.01", "0.1"} <= set(shown)
    assert not any("$" in text for text in shown)


def test_a_title_is_no_wider_than_its_panel(tmp_path):
    long = "simulated:logistic,20,400,lognormal,5 / explicit"
    fill(tmp_path, study(epsilons=[0.5, 1, 5, 8, 10]))
    with Ledger.read(tmp_path) as ledger:
        results = Results.read(ledger)
    drawing = next(each for each in figures.drawings(results) if len(each.panels) == 5)
    panels = [replace(panel, title=long) for panel in drawing.panels]
    figure = figures._figure(results, replace(drawing, panels=panels))
    figure.canvas.draw()
    for axes in figure.axes[:5]:
        assert axes.title.get_window_extent().width < 1.1 * axes.get_window_extent().width


def test_bands_are_the_standard_deviations_of_the_tables(tmp_path):
    """Seeds 42 and 7 are 35 apart: a sample standard deviation of 35 / sqrt 2."""
    fill(tmp_path, study(epsilons=[8]))
    figure = drawn(tmp_path)["score-by-round"]
    band = figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert band.height == pytest.approx(2 * 35 / 2**0.5)
    assert figure._supxlabel.get_text() == "Band: ± one standard deviation over 2 seeds"


def test_one_figure_per_setting_with_several_budgets(tmp_path):
    of = study(partitions=["iid", "dirichlet:1"])
    for setting in ("toy / iid", "toy / dirichlet:1"):
        with writing(tmp_path, of, setting=setting) as writer:
            for epsilon in of.epsilons:
                writer.search("dp-fedgd", epsilon, {"coarse": [({}, 60.0)]})
                writer.confirm("dp-fedgd", epsilon, {}, {42: {LAST: 60.0}, 7: {LAST: 61.0}})
    found = drawn(tmp_path)
    assert list(found) == ["score-by-round-toy-iid", "score-by-round-toy-dirichlet-1", "score-by-epsilon"]
    assert [axes.get_title() for axes in found["score-by-epsilon"].axes] == ["toy / iid", "toy / dirichlet:1"]
    assert [axes.get_title() for axes in found["score-by-round-toy-iid"].axes] == ["ε = 1", "ε = 8"]


def test_hostile_names_are_drawn_unchanged_and_reproducibly(tmp_path):
    reported.write(tmp_path)
    written = figures.write_figures(tmp_path)
    assert {path.suffix for path in written} == {".png", ".svg"}
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in figures.write_figures(tmp_path)] == before
    text = next(path for path in written if path.suffix == ".svg").read_text(encoding="utf-8")
    assert "${1}" in text
    assert "<b onclick" not in text
    assert "<img" not in text
