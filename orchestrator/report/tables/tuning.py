"""What the search chose, and how search strategies compare."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import search_spaces
from orchestrator.report.tables.common import (
    LOST,
    UNKNOWN,
    CellRow,
    bold_best,
    budget,
    by_budget,
    cell_table,
    mean_and_std,
    spread,
    unfinished,
)
from orchestrator.report.tables.render import NOTHING, Table
from orchestrator.results.winners import CellResult, Results, Score
from orchestrator.search.strategies import STRATEGIES
from orchestrator.search.strategies.base import Strategy
from orchestrator.study.study import Study
from search_spaces import Axis
from trainables.spec import HyperValue


def hyperparameters(results: Results, setting: str) -> Table:
    """Form of table 2 of the DP-FedSOFIM paper, with the chosen values instead of the searched ones."""
    study, cells = results.study, results.of(setting)
    columns = {"Chosen": "p", _validation(results): "r", "Found in": "l", "On edge": "p", "Extended": "p"}
    columns |= {"Trials": "r", "Diverged / failed": "r", "Within 1 s.e.": "r"}
    if study.private:
        hidden = {*columns} - {"Chosen", _validation(results), "On edge"}
    else:
        hidden = set() if study.may_add_stages else {"Extended"}
    return cell_table(
        results,
        setting,
        title="Chosen hyperparameters",
        summary="Which configuration won the search of every method, and how many others came close.",
        caption=[*_caption(results, setting), *_fixed_values(cells), *unfinished(cells)],
        columns={name: align for name, align in columns.items() if name not in hidden},
        groups=by_budget(
            results,
            setting,
            lambda cell: [text for name, text in zip(columns, _row(cell), strict=True) if name not in hidden],
        ),
        records=[(cell, _record(cell, study.private)) for cell in cells],
    )


def _row(cell: CellResult) -> list[str]:
    search, tied = cell.search, tied_count(cell)
    ended = search.states.total()
    return [
        configuration_text(cell, search.chosen),
        mean_and_std(validation_score(cell), cell.objective),
        " and ".join(search.found_in) or NOTHING,
        (", ".join(edges(cell)) or "none") if search.choice else NOTHING,
        ", ".join(_extended(cell)) or "none",
        str(ended) if ended == search.trials else f"{ended} of {search.trials}",
        " / ".join(str(search.states[state]) for state in LOST),
        NOTHING if tied is None else str(tied),
    ]


def _record(cell: CellResult, private: bool) -> dict[str, object]:
    search, validation = cell.search, validation_score(cell)
    winner = {
        "hyperparameters": json.dumps(search.chosen or {}),
        f"validation_{cell.objective.metric}": validation.mean,
    }
    edge = {"on_edge": ", ".join(edges(cell))}
    if private:
        return {**winner, **edge, "grid": search.configurations}
    return {
        **winner,
        "validation_std": validation.std,
        "found_in": " and ".join(search.found_in),
        **edge,
        "extended": ", ".join(_extended(cell)),
        "configurations": search.configurations,
        "trials": search.trials,
        **{state: search.states[state] for state in ("done", *LOST)},
        "within_standard_error": tied_count(cell),
    }


def _caption(results: Results, setting: str) -> list[str]:
    study, facts = results.study, results.facts(setting)
    rows = facts.validation_rows if facts else None
    edge = "On edge: ↑ (↓) marks the highest (lowest) value tried, so a better one may lie beyond"
    if study.private:
        return [
            f"Configurations were drawn at random from the grid, each run with independent noise; their number "
            f"({study.search.private.runs} distribution) stays secret. The best accuracy with Gaussian noise on "
            f"{f'{rows} validation rows' if rows else 'the validation rows'} won (Validation); nothing else about the "
            "other runs is shown.",
            f"{edge}.",
        ]
    return [
        *_rules(study),
        f"{edge}; (fine): in the fine grid only.",
        "Trials are counted over all seeds.",
        *(["Extended: how far the zoom went beyond the coarse grid."] if study.may_add_stages else []),
        *(variant.strategy.caption for variant in study.variants if variant.strategy.caption),
        *_tied_rules(study, rows),
    ]


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
    seeds, objective, rules = study.seeds, study.objective_spec, []
    for select in study.search.select:
        name = f"{select}: " if len(study.search.select) > 1 else ""
        by = seeds.search[:1] if select == "single" else seeds.search
        best = "best" if len(by) == 1 else "best mean"
        text = f"the {best} {objective.title} {objective.evaluated_on} after the last round (search {_seeds(by)})"
        if select == "contest" and seeds.contest:
            again = (
                f"{name}The configuration with {text} won, and ran again on {_seeds(seeds.contest)}."
                if study.search.finalists == 1
                else f"{name}{_finalists(study, text)} were compared again on {_seeds(seeds.contest)}. "
                f"{_contest_rule(study)}"
            )
            rules.append(f"{again} Validation: the winner's mean and standard deviation there.")
        else:
            rules.append(f"{name}The configuration with {text} won; ties go to the lower validation loss.")
    return rules


def _finalists(study: Study, text: str) -> str:
    """Which configurations met in the contest. `text`: the rule of strategies that leave the choice to us."""
    choosing = [name for name in study.search.strategies if type(STRATEGIES[name]).finalists is not Strategy.finalists]
    count = study.search.finalists
    if len(choosing) == len(study.search.strategies):
        return f"{count} configurations that the model expects to be best"
    of = f" (with {' and '.join(choosing)}: that the model expects to be best)" if choosing else ""
    return f"The {count} configurations with {text}{of}"


def _contest_rule(study: Study) -> str:
    steady = [name for name in study.search.strategies if STRATEGIES[name].prefers_small_spread]
    if not steady:
        return "The best mean won."
    of = f" ({', '.join(steady)})" if len(steady) < len(study.search.strategies) else ""
    return (
        "The best mean won or, among means within one paired standard error of it, the smallest standard deviation"
        f"{of}."
    )


def _tied_rules(study: Study, rows: int | None) -> list[str]:
    """What "Within 1 s.e." counts."""
    paired = "contest" in study.search.select and len(study.seeds.contest or study.seeds.search) > 1
    counted = "configurations, including the winner, within one"
    rules = [f"Within 1 s.e.: {counted} paired standard error of the best mean."] if paired else []
    if "single" not in study.search.select and paired:
        return rules
    if study.objective_spec.standard_error(50.0, 100) is None:
        return [*rules, "Within 1 s.e. is not shown for a single seed: the objective has no binomial standard error."]
    single, known = " (single)" if paired else "", rows or "unknown number of"
    return [*rules, f"Within 1 s.e.{single}: {counted} binomial standard error of the winner ({known} rows)."]


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _validation(results: Results) -> str:
    return f"Validation{results.study.objective_spec.unit}"


def validation_score(cell: CellResult) -> Score:
    """The winner's validation score, over the seeds that decided."""
    choice = cell.search.choice
    if choice is None:
        return UNKNOWN
    seeds = len(choice.candidate.keys)
    return Score(choice.score, choice.spread if seeds > 1 else math.nan, seeds)


def _tuned(cell: CellResult, configuration: Mapping[str, HyperValue]) -> dict[str, HyperValue]:
    """The hyperparameters for which more than one value was tried."""
    return {name: value for name, value in configuration.items() if len(cell.search.tried.get(name, ())) > 1}


def configuration_text(cell: CellResult, configuration: Mapping[str, HyperValue] | None) -> str:
    """The tuned values; all values if none was tuned."""
    return _assignments(_tuned(cell, configuration) or configuration) if configuration else NOTHING


def _assignments(values: Mapping[str, HyperValue]) -> str:
    return ", ".join(f"{name} = {shown_value(value)}" for name, value in values.items())


def edges(cell: CellResult) -> list[str]:
    """Chosen values beyond which no value was tried. Marked (fine): only the first stage tried values beyond."""
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


def tied_count(cell: CellResult) -> int | None:
    """Configurations within one standard error of the best; None without a winner, or if the number of validation rows
    is needed and unknown."""
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
        rows: list[CellRow] = []
        for method in results.study.methods:
            cells = [cell for cell in results.of(setting, epsilon) if cell.method == method]
            tests = [cell.curve[cell.last] if cell.complete(cell.last) else UNKNOWN for cell in cells]
            means = [None if math.isnan(test.mean) else test.mean for test in tests]
            shown = bold_best([mean_and_std(test, objective) for test in tests], means, objective)
            for cell, test, text in zip(cells, tests, shown, strict=True):
                cost = {"trials": cell.search.trials, "trial_rounds": cell.search.trial_rounds}
                validation = validation_score(cell)
                rows.append((cell, [*map(str, cost.values()), mean_and_std(validation, objective), text]))
                scores = {"test_mean": test.mean, "test_std": test.std}
                records.append((cell, {**cost, f"validation_{objective.metric}": validation.mean, **scores}))
        groups.append((budget(epsilon), rows))
    caption = (
        f"Validation {objective.title} of each search strategy's winner, and its test {objective.title} after the last "
        f"round, {spread(results)}. Bold: the best test score of each method. Validation scores of different "
        "strategies come from different seeds and rounds and are not comparable."
    )
    return cell_table(
        results,
        setting,
        title="Search strategies compared",
        summary="What each search strategy found for every method, and how many trials and rounds it took.",
        caption=[caption, *unfinished(results.of(setting))],
        columns=dict.fromkeys(["Trials", "Trial-rounds", _validation(results), f"Test{objective.unit}"], "r"),
        groups=groups,
        records=records,
    )
