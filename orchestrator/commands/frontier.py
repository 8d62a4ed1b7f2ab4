"""`fedsweep frontier`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.commands.options import Folder, Json
from orchestrator.commands.sweep import warn_if_unfinished
from orchestrator.console import show
from trainables.choices import Release
from trainables.errors import UserError

if TYPE_CHECKING:
    from orchestrator.results.surfaces import Point, StudySurface


def frontier(
    folder: Folder,
    method: Annotated[
        str | None, typer.Option(help="Only this method, by its name in the tables or a part of it.")
    ] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="Budget to predict for, searched or not; repeatable.  [default: a curve]")
    ] = None,
    reach: Annotated[
        float | None,
        typer.Option(
            metavar="SCORE", help="Find the smallest eps whose predicted score reaches this, e.g. 75 (percent)."
        ),
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Delta.  [default: the study's]")] = None,
    release: Annotated[Release | None, typer.Option(help="Release model.  [default: the study's]")] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Only configurations with this many rounds; for studies that search the rounds.")
    ] = None,
    confirm: Annotated[
        int,
        typer.Option(metavar="SEEDS", help="Train the configurations of --epsilon and --reach on this many new seeds."),
    ] = 0,
    figure: Annotated[bool, typer.Option(help="Draw the curve with its band into DIR/figures/frontier.svg.")] = False,
    json: Json = False,
) -> None:
    """Predict score and hyperparameters for any budget.

    For results of the strategy `surface`.

    The validation score of the best configuration is predicted by a model of all trials of searches and contests, with
    a band of two standard deviations on either side."""
    from orchestrator.execution.frontier import confirmed, draw_frontier, read_surfaces

    study, surfaces = read_surfaces(folder)
    warn_if_unfinished(folder)
    chosen = [surface for surface in surfaces if method in (None, surface.method.shown, surface.method.name)]
    chosen = chosen or [surface for surface in surfaces if str(method).lower() in surface.method.shown.lower()]
    if not chosen:
        names = "; ".join(dict.fromkeys(surface.method.shown for surface in surfaces))
        raise UserError(f"method = {method!r} was not searched by surface; methods: {names}")
    unit = study.objective_spec.unit
    if reach is not None and unit and 0 < reach <= 1:
        raise UserError(f"reach = {reach:g}: scores are in percent, so a share of {reach:g} is {100 * reach:g}")
    if confirm and not (epsilon or reach is not None):
        raise UserError("--confirm trains the configurations of --epsilon or --reach, and neither is given")
    answers: list[dict[str, Any]] = []
    lines: list[str] = []
    for surface in chosen:
        title = surface.study.objective_spec.title
        lines.append(f"{surface.setting} / {surface.method.shown}: validation {title} ± two standard deviations")
        points: list[tuple[Point, str]] = []
        if reach is not None:
            if (reached := surface.reach(reach, delta, release, rounds)) is not None:
                first = reached.epsilon == min(surface.budgets(delta, release))
                perhaps, surely = surface.reach_of_band(reach, delta, release, rounds)
                note = _reached(reach, first=first, perhaps=perhaps, surely=surely)
                points.append((reached, f"  <- {note}"))
            else:
                lines.append(
                    f"  no finite eps from {_budgets(surface, delta, release)} is predicted to reach {reach:g}"
                )
        if epsilon:
            points += [(surface.at(value, delta, release, rounds), "") for value in epsilon]
        elif reach is None:
            points += [(point, "") for point in surface.curve(delta, release, rounds)]
        for point, note in points:
            answer = {"setting": surface.setting, "method": surface.method.shown, **asdict(point)}
            lines.append(f"  {_line(surface, point)}{note}")
            if confirm:
                found = confirmed(surface, point, confirm, delta, release)
                answer |= {"confirmed": found.mean, "confirmed_error": found.error, "confirmed_seeds": found.seeds}
                shown = study.objective_spec.format
                error = f", standard error {shown(found.error)}" if found.seeds > 1 else ""
                seeds = "1 seed" if found.seeds == 1 else f"{found.seeds} seeds"
                lines.append(f"      confirmed on {seeds}: {shown(found.mean)}{error}")
            answers.append(answer)
    if reach is not None and not answers:
        methods = "; ".join(surface.method.shown for surface in chosen)
        raise UserError(
            f"reach = {reach:g}: no finite eps from {_budgets(chosen[0], delta, release)} is predicted to reach "
            f"{reach:g} for {methods}"
        )
    if figure:
        lines.append(str(draw_frontier(folder, chosen, delta, release, rounds)))
    lines.append(
        "Scores are means over seeds on this study's validation rows. Test scores can differ by more than the band: "
        "the table `selection` shows by how much. `fedsweep best` shows the winners of the contests."
    )
    show(answers, json, lines)


def _reached(target: float, *, first: bool, perhaps: float | None, surely: float | None) -> str:
    """`perhaps`, `surely`: where the better and the worse end of the band reach the target."""
    if first:
        return f"reaches {target:g}; smaller budgets were not searched"
    until = "beyond the searched budgets" if surely is None else f"{surely:.3g}"
    band = "" if perhaps is None else f" (within the band: from {perhaps:.3g} to {until})"
    return f"smallest eps that is predicted to reach {target:g}{band}"


def _budgets(surface: StudySurface, delta: float | None, release: Release | None) -> str:
    budgets = surface.budgets(delta, release) or list(surface.epsilons)
    return f"{min(budgets):.3g} to {max(budgets):.3g}"


def _line(surface: StudySurface, point: Point) -> str:
    from orchestrator.report.tables.tuning import shown_value

    shown = surface.study.objective_spec.format
    values = ", ".join(f"{name}={shown_value(point.configuration[name])}" for name in surface.lattice.axes)
    searched = "searched budget" if point.searched else "between searched budgets"
    band = f"{shown(point.score)} ± {shown(2 * point.deviation)}"
    return f"eps {point.epsilon:<8.4g} {band}  noise {point.noise:.4g}  {values}  ({searched})"
