"""What the search chose, and how search strategies compare."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import pandas as pd

import search_spaces
from orchestrator.report.tables.common import LOST, bold_best, budget, cell_table, mean_and_std, spread, unfinished
from orchestrator.report.tables.render import NOTHING, Table
from orchestrator.results.frames import NAMES, names
from orchestrator.results.winners import CellResult, Results, Score
from orchestrator.search.objective import ACCURACY
from orchestrator.study.study import Study
from search_spaces import Axis
from trainables.spec import HyperValue


def hyperparameters(results: Results, setting: str) -> Table:
    """Form of table 2 of the DP-FedSOFIM paper, with the chosen values instead of the searched ones."""
    study, cells = results.study, results.of(setting)
    zoom = study.may_add_stages
    columns = {"Chosen": "p", _validation(results): "r", "Found in": "l", "On edge": "p"}
    columns |= {"Extended": "p"} if zoom else {}
    columns |= {"Trials": "r", "Diverged / failed": "r", "Within 1 s.e.": "r"}
    if study.private:
        columns = {"Chosen": "p", _validation(results): "r", "On edge": "p"}
    frame = pd.DataFrame([_record(results, cell) for cell in cells])
    return cell_table(
        results,
        setting,
        title="Chosen hyperparameters",
        summary="Which configuration won the search of every method, and how many others came close.",
        caption=[*_caption(results, setting, zoom), *_fixed_values(cells), *unfinished(cells)],
        columns=list(columns),
        align="".join(columns.values()),
        groups=[
            (budget(epsilon), [(cell, _row(results, cell, zoom)) for cell in results.of(setting, epsilon)])
            for epsilon in study.epsilons
        ],
        data=frame if study.private else frame.astype({"within_standard_error": "Int64"}),
    )


def _row(results: Results, cell: CellResult, zoom: bool) -> list[str]:
    search, tied = cell.search, tied_count(results, cell)
    ended = search.states.total()
    chosen = configuration_text(cell, search.chosen)
    edge = (", ".join(edges(cell)) or "none") if search.choice else NOTHING
    if results.study.private:
        return [chosen, validation_text(cell), edge]
    return [
        chosen,
        validation_text(cell),
        " and ".join(search.found_in) or NOTHING,
        edge,
        *([", ".join(_extended(cell)) or "none"] if zoom else []),
        str(ended) if ended == search.trials else f"{ended} of {search.trials}",
        " / ".join(str(search.states[state]) for state in LOST),
        NOTHING if tied is None else str(tied),
    ]


def _record(results: Results, cell: CellResult) -> dict[str, object]:
    search, validation = cell.search, validation_score(cell)
    winner = {
        **names(cell),
        "hyperparameters": json.dumps(search.chosen or {}),
        f"validation_{cell.objective.metric}": validation.mean if validation else None,
    }
    if results.study.private:
        return {**winner, "on_edge": ", ".join(edges(cell)), "grid": search.configurations}
    return {
        **winner,
        "validation_std": validation.std if validation and validation.seeds > 1 else None,
        "found_in": " and ".join(search.found_in),
        "on_edge": ", ".join(edges(cell)),
        "extended": ", ".join(_extended(cell)),
        "configurations": search.configurations,
        "trials": search.trials,
        **{state: search.states[state] for state in ("done", *LOST)},
        "within_standard_error": tied_count(results, cell),
    }


def _caption(results: Results, setting: str, zoom: bool) -> list[str]:
    study, facts = results.study, results.facts(setting)
    rows = facts.validation_rows if facts else None
    edge = "On edge: ↑ (↓) marks a value that is the highest (lowest) tried, so a better one may lie beyond"
    if study.private:
        return [
            f"Configurations were drawn at random from the grid, each run with independent noise; their number "
            f"({study.search.private.runs} distribution) stays secret. The best accuracy with Gaussian noise on "
            f"{f'{rows} validation rows' if rows else 'the validation rows'} won (Validation: that noisy score); "
            "nothing else about the other runs is shown.",
            f"{edge}.",
        ]
    caption = [*_rules(study), f"{edge}; (fine): on an edge of the fine grid only, inside the coarse one."]
    if zoom:
        caption.append("Extended: how far the zoom went beyond the coarse grid.")
    caption.append(
        "Trials: all trials of the search, over all seeds; a configuration in both grids with the same number of "
        "rounds runs once."
    )
    caption += [v.strategy.caption for v in study.variants if v.strategy.caption]
    return [*caption, *_tied_rules(study, rows)]


def _fixed_values(cells: Sequence[CellResult]) -> list[str]:
    by_method = {}
    for cell in cells:
        chosen, tuned = cell.search.chosen or {}, _tuned(cell, cell.search.chosen or {})
        if tuned:
            by_method[cell.method.shown] = {name: value for name, value in chosen.items() if name not in tuned}
    texts = [f"{method}: {_assignments(values)}" for method, values in by_method.items() if values]
    return [f"Not tuned: {'; '.join(texts)}."] if texts else []


def _rules(study: Study) -> list[str]:
    """How winners are chosen."""
    title, found = study.objective_spec.title, study.objective_spec.evaluated_on
    seeds, contest = study.seeds, study.seeds.contest
    rules = []
    for select in study.search.select:
        name = f"{select}: " if len(study.search.select) > 1 else ""
        if select == "single" or len(seeds.search) == 1:
            text = f"the best {title} {found} after the last round (search seed {seeds.search[0]})"
        else:
            text = f"the best mean {title} {found} after the last round (search {_seeds(seeds.search)})"
        if select == "contest" and contest:
            rules.append(
                f"{name}The {study.search.finalists} configurations with {text} were compared in a contest on the "
                f"same rows, with {_seeds(contest)} and the number of rounds of confirm. The best mean won; among "
                "means within one paired standard error of it, the smallest standard deviation over seeds won, then "
                "the better search score. Validation: the winner's mean and sample standard deviation in the contest."
            )
        else:
            rules.append(
                f"{name}The configuration with {text} won; ties go to the lower validation loss, then to the earlier "
                "place in the grid."
            )
    return rules


def _tied_rules(study: Study, rows: int | None) -> list[str]:
    """What "Within 1 s.e." counts."""
    paired = "contest" in study.search.select and len(study.seeds.contest or study.seeds.search) > 1
    rules = []
    if paired:
        rules.append(
            "Within 1 s.e.: configurations, including the winner, whose mean is within one paired standard error of "
            "the best mean over the seeds that decided."
        )
    if "single" in study.search.select or not paired:
        if study.objective_spec is not ACCURACY:
            rules.append("Within 1 s.e. is shown for a single seed only where accuracy is the objective.")
        else:
            error = f"(binomial, {rows} rows)" if rows else "(binomial, unknown number of rows)"
            rules.append(
                f"Within 1 s.e.{' (single)' if paired else ''}: configurations, including the winner, whose validation "
                f"accuracy is at most one standard error {error} below the winner's."
            )
    return rules


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _validation(results: Results) -> str:
    return f"Validation{results.study.objective_spec.unit}"


def validation_score(cell: CellResult) -> Score | None:
    """The winner's, over the seeds that decided."""
    choice = cell.search.choice
    if choice is None:
        return None
    seeds = len(choice.candidate.keys)
    return Score(choice.score, choice.spread if seeds > 1 else math.nan, seeds)


def validation_text(cell: CellResult) -> str:
    score = validation_score(cell)
    return NOTHING if score is None else mean_and_std(score, cell.objective)


def _tuned(cell: CellResult, configuration: Mapping[str, HyperValue]) -> dict[str, HyperValue]:
    """The hyperparameters for which more than one value was tried."""
    return {name: value for name, value in configuration.items() if len(cell.search.tried.get(name, ())) > 1}


def configuration_text(cell: CellResult, configuration: Mapping[str, HyperValue] | None) -> str:
    """The tuned values; all values if none was tuned."""
    return _assignments(_tuned(cell, configuration) or configuration) if configuration else NOTHING


def _assignments(values: Mapping[str, HyperValue]) -> str:
    return ", ".join(f"{name} = {shown_value(value)}" for name, value in values.items())


def edges(cell: CellResult) -> list[str]:
    """Chosen values with nothing tried beyond them, in any stage or, marked (fine), in the stages after the first."""
    found, fine = [], _refined(cell)
    for name, value in _tuned(cell, cell.search.chosen or {}).items():
        for axis, mark in ((cell.search.tried[name], ""), (fine.get(name, ()), " (fine)")):
            if value in axis and search_spaces.on_edge(axis, value):
                found.append(f"{name} {'↑' if float(value) == max(float(v) for v in axis) else '↓'}{mark}")
                break
    return found


def _extended(cell: CellResult) -> list[str]:
    """Axes on which later stages go beyond the first one, and how far."""
    found, fine = [], _refined(cell)
    for name, axis in next(iter(cell.search.axes.values()), {}).items():
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
    """The values tried of every hyperparameter in the stages after the first, where stages are grids."""
    stages = [] if cell.variant.strategy.samples_ranges else list(cell.search.axes.values())[1:]
    names = dict.fromkeys(name for axes in stages for name in axes)
    return {name: tuple(dict.fromkeys(v for axes in stages for v in axes.get(name, ()))) for name in names}


def tied_count(results: Results, cell: CellResult) -> int | None:
    """Configurations within one standard error of the best; None if that needs an unknown number of validation rows."""
    choice = cell.search.choice
    known = cell.facts is not None
    return choice.within_standard_error if choice and (known or len(choice.candidate.keys) > 1) else None


def shown_value(value: HyperValue) -> str:
    """As a person would type it; long floats are cut to six digits (best.yaml has all)."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.6g}"
    return short if float(short) == value or len(repr(value)) > 12 else repr(value)


def search_strategies(results: Results, setting: str) -> Table | None:
    """None where the study has a single search strategy."""
    if not results.several_strategies:
        return None
    objective = results.study.objective_spec
    groups, records = [], []
    for epsilon in results.study.epsilons:
        rows = []
        for method in results.study.methods:
            cells = [cell for cell in results.of(setting, epsilon) if cell.method == method]
            tests = [cell.curve[cell.last] if cell.complete(cell.last) else None for cell in cells]
            means = [score.mean if score else None for score in tests]
            shown = bold_best([NOTHING if s is None else mean_and_std(s, objective) for s in tests], means, objective)
            for cell, test, text in zip(cells, tests, shown, strict=True):
                search, validation = cell.search, validation_score(cell)
                rows.append((cell, [str(search.trials), str(search.trial_rounds), validation_text(cell), text]))
                records.append(
                    {
                        **names(cell),
                        "trials": search.trials,
                        "trial_rounds": search.trial_rounds,
                        f"validation_{objective.metric}": validation.mean if validation else None,
                        "test_mean": test.mean if test else None,
                        "test_std": test.std if test else None,
                    }
                )
        groups.append((budget(epsilon), rows))
    caption = (
        f"The same methods and budgets with each search strategy: validation {objective.title} of the winner, and its "
        f"test {objective.title} after the last round, {spread(results)}. Bold: the best test score of each method. "
        "Validation scores of different strategies come from different seeds and rounds and are not comparable."
    )
    return cell_table(
        results,
        setting,
        title="Search strategies compared",
        summary="What each search strategy found for every method, and how many trials and rounds it took.",
        caption=[caption, *unfinished(results.of(setting))],
        columns=["Trials", "Trial-rounds", _validation(results), f"Test{objective.unit}"],
        align="rrrr",
        groups=groups,
        data=pd.DataFrame(
            records,
            columns=[*NAMES, "trials", "trial_rounds", f"validation_{objective.metric}", "test_mean", "test_std"],
        ),
    )
