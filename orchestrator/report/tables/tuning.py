"""What the search chose, and how one way of searching compares with another."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pandas as pd

import search_spaces
from orchestrator.report.tables.common import (
    LOST,
    NAMES,
    bold_best,
    budget,
    mean_and_std,
    name_columns,
    named_rows,
    names,
    spread,
    unfinished,
)
from orchestrator.report.tables.render import NOTHING, Group, Table
from orchestrator.results.winners import CellResult, Results, Score
from orchestrator.study.objective import ACCURACY
from orchestrator.study.settings import Study
from search_spaces import Axis
from trainables.spec import HyperValue


def hyperparameters(results: Results, setting: str) -> Table:
    """Form of table 2 of the DP-FedSOFIM paper, with what was chosen in the place of what was searched."""
    zoom = results.study.search.refine == "zoom" and "grid" in results.study.search.strategies
    headings = ["Chosen", _validation(results), "Found in", "On edge", *(["Extended"] if zoom else [])]
    headings += ["Trials", "Lost", "Within 1 s.e."]
    if results.study.private:  # of which nothing is shown but the winner
        headings = ["Chosen", _validation(results), "On edge"]
    groups = []
    for epsilon in results.study.epsilons:
        cells = results.of(setting, epsilon)
        groups.append(Group(budget(epsilon), named_rows(results, cells, [_row(results, cell, zoom) for cell in cells])))
    frame = pd.DataFrame([_record(results, cell) for cell in results.of(setting)])
    return Table(
        title=f"Chosen hyperparameters: {setting}",
        summary="Which configuration won the search of every method, and how clear a win it was.",
        caption=_caption(results, setting, zoom),
        columns=[*name_columns(results), *headings],
        align="l" * len(name_columns(results)) + ("prp" if results.study.private else "prlp" + "p" * zoom + "rrr"),
        groups=groups,
        data=frame if results.study.private else frame.astype({"within_standard_error": "Int64"}),
    )


def _row(results: Results, cell: CellResult, zoom: bool) -> list[str]:
    search, choice, alike = cell.search, cell.search.choice, near(results, cell)
    tuned = _chosen(cell, tuned=True) or _chosen(cell)
    ended = search.states.total()
    chosen = ", ".join(f"{name} = {shown_value(value)}" for name, value in tuned.items()) or NOTHING
    edge = (", ".join(edges(cell)) or "none") if choice else NOTHING
    if results.study.private:
        return [chosen, _validated(cell), edge]
    return [
        chosen,
        _validated(cell),
        " and ".join(search.found_in) or NOTHING,
        edge,
        *([", ".join(_extended(cell)) or "none"] if zoom else []),
        str(ended) if ended == search.trials else f"{ended} of {search.trials}",
        " / ".join(str(search.states[state]) for state in LOST),
        NOTHING if alike is None else str(alike),
    ]


def _record(results: Results, cell: CellResult) -> dict[str, object]:
    search = cell.search
    winner = {
        **names(cell),
        "hyperparameters": json.dumps(_chosen(cell)),
        f"validation_{cell.objective.metric}": search.choice.score if search.choice else None,
    }
    if results.study.private:
        return {**winner, "on_edge": ", ".join(edges(cell)), "grid": search.configurations}
    return {
        **winner,
        "validation_std": search.choice.spread if search.choice and len(search.choice.contender.keys) > 1 else None,
        "found_in": " and ".join(search.found_in),
        "on_edge": ", ".join(edges(cell)),
        "extended": ", ".join(_extended(cell)),
        "configurations": search.configurations,
        "trials": search.trials,
        **{state: search.states[state] for state in ("done", *LOST)},
        "within_standard_error": near(results, cell),
    }


def _caption(results: Results, setting: str, zoom: bool) -> str:
    study, cells = results.study, results.of(setting)
    rows = results.facts.get(f"validation_rows:{setting}")
    edge = "On edge: ↑ (↓) marks a value that is the highest (lowest) tried, so a better one may lie beyond"
    if study.private:
        return " ".join([*_private_rules(study, rows), f"{edge}.", *_fixed_values(cells), *unfinished(cells)])
    caption = [*_rules(study), f"{edge}; (fine): only of the fine grid, and the coarse one went further."]
    if zoom:
        caption.append("Extended: where zooming went on beyond an edge of the coarse grid.")
    caption.append(
        "Trials: of the whole search, all seeds counted; a configuration that is in both grids, with as many rounds, "
        "runs once. "
        "Lost: how many of them diverged / failed."
    )
    if "halving" in study.search.strategies:
        caption.append(
            "halving: rungs below the last ended after a part of the rounds, and the best of each ran again on the "
            "next; only the last, where they run to the end, is compared."
        )
    caption += _told_apart(study, rows)
    return " ".join([*caption, *_fixed_values(cells), *unfinished(cells)])


def _private_rules(study: Study, rows: int | None) -> list[str]:
    judged = f"{rows} validation rows" if rows else "validation rows"
    return [
        f"Configurations were drawn at random from the grid, a {study.search.private.runs} number of them that stays "
        "secret, each run with noise of its own. The best share of right answers, with Gaussian noise, on "
        f"{judged} won (Validation: that noisy score), and nothing else is shown of the others."
    ]


def _fixed_values(cells: Sequence[CellResult]) -> list[str]:
    fixed = {cell.method.shown: _untuned(cell) for cell in cells if cell.search.chosen and _chosen(cell, tuned=True)}
    texts = [
        f"{method}: {', '.join(f'{name} = {shown_value(value)}' for name, value in values.items())}"
        for method, values in fixed.items()
        if values
    ]
    return [f"Not tuned: {'; '.join(texts)}."] if texts else []


def _rules(study: Study) -> list[str]:
    """How winners are picked, in words."""
    title, found = study.judged_by.title, study.judged_by.found
    seeds, contest = study.seeds, study.seeds.contest
    ties = "ties go to the lower validation loss, then to the earlier place in the grid."
    several = len(study.search.select) > 1
    rules = []
    for select in study.search.select:
        name = f"{select}: " if several else ""
        if select == "single" or len(seeds.search) == 1:
            text = f"the best {title} {found} after the last round of its search trial (seed {seeds.search[0]})"
        else:
            text = f"the best mean {title} {found} after the last round of its search trials ({_seeds(seeds.search)})"
        if select == "contest" and contest:
            rules.append(
                f"{name}The {study.search.contenders} configurations with {text} met again with {_seeds(contest)} and "
                "as many rounds as confirm has, judged on the same rows. The best mean won; among those within one "
                "paired standard error of it the smallest spread over the seeds, then the better in the search. "
                "Validation: mean and sample standard deviation of the winner in that contest."
            )
        else:
            rules.append(f"{name}The configuration with {text}; {ties}")
    return rules


def _told_apart(study: Study, rows: int | None) -> list[str]:
    """What the last column counts."""
    paired = "contest" in study.search.select and len(study.seeds.contest or study.seeds.search) > 1
    found = []
    if paired:
        found.append(
            "Within 1 s.e.: configurations, the winner among them, whose mean lies within one paired standard error of "
            "the best one's over the seeds that decided."
        )
    if "single" in study.search.select or not paired:
        if study.judged_by is not ACCURACY:
            found.append("Within 1 s.e. is told for a single seed only where accuracy is the objective.")
        else:
            found.append(
                f"Within 1 s.e.{' (single)' if paired else ''}: configurations, the winner among them, whose "
                "validation accuracy is at most one standard error "
                + (
                    f"of a share of {rows} rows below the winner's."
                    if rows
                    else "below the winner's (row count unknown)."
                )
            )
    return found


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _validated(cell: CellResult) -> str:
    choice = cell.search.choice
    if choice is None:
        return NOTHING
    seeds = len(choice.contender.keys)
    return mean_and_std(Score(choice.score, choice.spread if seeds > 1 else math.nan, seeds), cell.objective)


def _validation(results: Results) -> str:
    return f"Validation{results.study.judged_by.unit}"


def _chosen(cell: CellResult, *, tuned: bool = False) -> dict[str, HyperValue]:
    """The winner's hyperparameters: all, or those of which more than one value was tried."""
    chosen = cell.search.chosen or {}
    return {name: value for name, value in chosen.items() if not tuned or len(cell.search.tried.get(name, ())) > 1}


def _untuned(cell: CellResult) -> dict[str, HyperValue]:
    tuned = _chosen(cell, tuned=True)
    return {name: value for name, value in _chosen(cell).items() if name not in tuned}


def edges(cell: CellResult) -> list[str]:
    """Values with nothing tried beyond them; those at the end of the fine grid alone are marked as such."""
    found, fine = [], _refined(cell)
    for name, value in _chosen(cell, tuned=True).items():
        for axis, mark in ((cell.search.tried[name], ""), (fine.get(name, ()), " (fine)")):
            if value in axis and search_spaces.on_edge(axis, value):
                found.append(f"{name} {'↑' if float(value) == max(float(v) for v in axis) else '↓'}{mark}")
                break
    return found


def _extended(cell: CellResult) -> list[str]:
    """Axes that the fine grid carried on beyond the coarse one, and how far."""
    found, fine = [], _refined(cell)
    for name, axis in cell.search.axes.get("coarse", {}).items():
        beyond = fine.get(name, ())
        if len(axis) < 2 or not beyond or not search_spaces.is_numeric((*axis, *beyond)):
            continue
        low, high = min(float(v) for v in beyond), max(float(v) for v in beyond)
        if low < min(float(v) for v in axis):
            found.append(f"{name} ↓ to {shown_value(low)}")
        if high > max(float(v) for v in axis):
            found.append(f"{name} ↑ to {shown_value(high)}")
    return found


def _refined(cell: CellResult) -> dict[str, Axis]:
    """The values tried of every hyperparameter in the stages after the coarse one."""
    stages = [axes for stage, axes in cell.search.axes.items() if stage != "coarse"]
    names = dict.fromkeys(name for axes in stages for name in axes)
    return {name: tuple(dict.fromkeys(v for axes in stages for v in axes.get(name, ()))) for name in names}


def near(results: Results, cell: CellResult) -> int | None:
    """Configurations that cannot be told from the winner; None where that takes a number of rows that nobody knows."""
    choice = cell.search.choice
    known = f"validation_rows:{cell.setting}" in results.facts
    return choice.within_standard_error if choice and (known or len(choice.contender.keys) > 1) else None


def shown_value(value: HyperValue) -> str:
    """As a person would type it; what a sampler drew is cut to six digits (best.yaml has them all)."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.6g}"
    return short if float(short) == value or len(repr(value)) > 12 else repr(value)


# ---- ways of searching


def search_strategies(results: Results, setting: str) -> Table | None:
    """None where the study searches in one way only."""
    if not results.several_strategies:
        return None
    objective = results.study.judged_by
    groups, records = [], []
    for epsilon in results.study.epsilons:
        rows: list[list[str]] = []
        for method in results.study.methods:
            cells = [cell for cell in results.of(setting, epsilon) if cell.method == method]
            choices = [cell.search.choice for cell in cells]
            tests = [cell.curve[cell.last] if cell.complete(cell.last) else None for cell in cells]
            test = [score.mean if score else None for score in tests]
            columns = [
                [str(cell.search.trials) for cell in cells],
                [str(cell.search.trial_rounds) for cell in cells],
                [_validated(cell) for cell in cells],
                bold_best([NOTHING if s is None else mean_and_std(s, objective) for s in tests], test, objective),
            ]
            rows += named_rows(results, cells, zip(*columns, strict=True))
            records += [
                {
                    **names(cell),
                    "trials": cell.search.trials,
                    "trial_rounds": cell.search.trial_rounds,
                    f"validation_{objective.metric}": choice.score if choice else None,
                    "test_mean": score.mean if score else None,
                    "test_std": score.std if score else None,
                }
                for cell, choice, score in zip(cells, choices, tests, strict=True)
            ]
        groups.append(Group(budget(epsilon), rows))
    caption = (
        f"The same methods and budgets, searched in each way: validation {objective.title} of the winner, and its test "
        f"{objective.title} after the last round, {spread(results)}. The better test score of each method is bold; "
        "validation scores of different ways are not of the same seeds and rounds, and do not compare."
    )
    return Table(
        title=f"Ways of searching compared: {setting}",
        summary="What each way of searching found for every method, and with how many trials and rounds of them.",
        caption=" ".join([caption, *unfinished(results.of(setting))]),
        columns=[*name_columns(results), "Trials", "Trial-rounds", _validation(results), f"Test{objective.unit}"],
        align="llrrrr",
        groups=groups,
        data=pd.DataFrame(
            records,
            columns=[*NAMES, "trials", "trial_rounds", f"validation_{objective.metric}", "test_mean", "test_std"],
        ),
    )
