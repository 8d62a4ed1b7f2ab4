"""A figure of the expected score at any budget, by the models (surfaces) that the strategy `surface` fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.report import palette
from orchestrator.report.figures import METADATA, PANEL, STYLE, load_matplotlib, log_numbers
from orchestrator.results.surfaces import StudySurface
from trainables.choices import Release
from trainables.files import replacing, subfolder


def draw(
    folder: Path,
    surfaces: Sequence[StudySurface],
    delta: float | None = None,
    release: Release | None = None,
    rounds: int | None = None,
) -> Path:
    """DIR/figures/frontier.svg: a panel per setting, a curve with its band per method, and the searched budgets."""
    load_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys(surface.setting for surface in surfaces))
    methods = list(dict.fromkeys(surface.method.shown for surface in surfaces))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.6 * PANEL[0] * len(settings), 1.6 * PANEL[1]), layout="constrained")
        panels = figure.subplots(1, len(settings), squeeze=False)[0]
        for panel, setting in zip(panels, settings, strict=True):
            for surface in (each for each in surfaces if each.setting == setting):
                points = surface.curve(delta, release, rounds)
                color = palette.ON_LIGHT[methods.index(surface.method.shown) % len(palette.ON_LIGHT)]
                epsilons, scores = [p.epsilon for p in points], [p.score for p in points]
                low, high = ([p.score + side * p.deviation for p in points] for side in (-2, 2))
                panel.plot(epsilons, scores, color=color, label=surface.method.shown)
                panel.fill_between(epsilons, low, high, color=color, alpha=0.15, linewidth=0)
                searched = [p for p in points if p.searched]
                panel.plot([p.epsilon for p in searched], [p.score for p in searched], "o", ms=3, color=color)
            panel.set(title=setting, xlabel="ε")
            log_numbers(panel)
            objective = surfaces[0].study.objective_spec
            panel.set_ylabel(f"expected validation {objective.title}{objective.unit}")
            panel.legend()
        file = subfolder(folder, "figures") / "frontier.svg"
        with replacing(file) as temporary:
            figure.savefig(temporary, format="svg", metadata=METADATA["svg"])
    return file
