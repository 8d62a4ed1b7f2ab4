"""How every winner was chosen: what one seed would have taken, and how validation compares with what came of it."""

from __future__ import annotations

import math
from statistics import fmean

import pandas as pd

from orchestrator.report.tables.common import (
    NAMES,
    budget,
    mean_and_std,
    name_columns,
    named_rows,
    names,
    unfinished,
)
from orchestrator.report.tables.render import NOTHING, Group, Table
from orchestrator.report.tables.tuning import near, shown_value
from orchestrator.results.winners import CellResult, Results, Score
from trainables.spec import HyperValue


def selection(results: Results, setting: str) -> Table | None:
    """None where only the winner is shown."""
    if results.study.private:
        return None
    objective, cells = results.study.judged_by, results.of(setting)
    columns = ["One seed would take", "Chosen", "Validation", "Test", "Difference", "Tied"]
    groups = [
        Group(budget(epsilon), named_rows(results, mine, [_row(results, cell) for cell in mine]))
        for epsilon in results.study.epsilons
        if (mine := results.of(setting, epsilon))
    ]
    caption = (
        f"One seed would take: the configuration with the best {objective.title} {objective.found} on the first search "
        "seed alone. Chosen: what won. Validation: its mean ± sample standard deviation over the seeds that decided; "
        f"Test: the same over the confirm seeds{objective.unit}. Difference: validation minus test. "
        "Tied: configurations, the winner among them, that could not be told from the best one when it was chosen."
    )
    return Table(
        title=f"How winners were chosen: {setting}",
        summary="What a single seed would have chosen, what was chosen, and how far validation was from test.",
        caption=" ".join([caption, *_shift(results, cells), *unfinished(cells)]),
        columns=[*name_columns(results), *columns],
        align="l" * len(name_columns(results)) + "pprrrr",
        groups=groups,
        data=pd.DataFrame([_record(results, cell) for cell in cells], columns=[*NAMES, *RECORD]).astype(
            {"tied": "Int64"}
        ),
    )


RECORD = ("one_seed", "chosen", "same", "validation", "validation_std", "test", "test_std", "difference", "tied")


def _shift(results: Results, cells: list[CellResult]) -> list[str]:
    """What all configurations have in common is no optimism of a choice: the validation rows are harder or easier."""
    gaps = [gap for cell in cells if (gap := _gap(cell)) is not None]
    if len(gaps) < 2:
        return []
    shown = results.study.judged_by.shown
    more = " and in the rows that confirm trains on besides" if results.study.confirm_train_on == "all" else ""
    sentences = [
        f"Over all cells validation is {shown(abs(fmean(gaps)))} {'above' if fmean(gaps) > 0 else 'below'} test on "
        f"average ({shown(min(gaps))} to {shown(max(gaps))}): what all have in common lies in the rows that "
        f"judge{more}, and no number of seeds cures it; what differs between cells is chance and the choice's optimism."
    ]
    lucky = [cell for cell in cells if cell.search.by_one_seed not in (None, cell.search.chosen)]
    if lucky:
        sentences.append(f"In {len(lucky)} of {len(cells)} cells one seed would have taken another configuration.")
    return sentences


def _gap(cell: CellResult) -> float | None:
    choice = cell.search.choice
    return choice.score - cell.curve[cell.last].mean if choice and cell.complete(cell.last) else None


def _row(results: Results, cell: CellResult) -> list[str]:
    choice, search, gap, tied = cell.search.choice, cell.search, _gap(cell), near(results, cell)
    test = cell.curve.get(cell.last)
    return [
        "the same" if _same(cell) else _shown(cell, search.by_one_seed),
        _shown(cell, search.chosen),
        NOTHING if choice is None else mean_and_std(_validated(cell), cell.objective),
        NOTHING if test is None else mean_and_std(test, cell.objective),
        NOTHING if gap is None else cell.objective.shown(gap),
        NOTHING if tied is None else str(tied),
    ]


def _same(cell: CellResult) -> bool | None:
    """Whether one seed would have taken what was chosen; None where nothing has been yet."""
    return None if cell.search.chosen is None else cell.search.by_one_seed == cell.search.chosen


def _validated(cell: CellResult) -> Score:
    choice = cell.search.choice
    assert choice is not None
    seeds = len(choice.contender.keys)
    return Score(choice.score, choice.spread if seeds > 1 else math.nan, seeds)


def _shown(cell: CellResult, configuration: dict[str, HyperValue] | None) -> str:
    """What the search varied of it."""
    if configuration is None:
        return NOTHING
    tried = cell.search.tried
    varied = {name: value for name, value in configuration.items() if len(tried.get(name, ())) > 1} or configuration
    return ", ".join(f"{name} = {shown_value(value)}" for name, value in varied.items())


def _record(results: Results, cell: CellResult) -> dict[str, object]:
    choice, search, test = cell.search.choice, cell.search, cell.curve.get(cell.last)
    return {
        **names(cell),
        "one_seed": _shown(cell, search.by_one_seed),
        "chosen": _shown(cell, search.chosen),
        "same": _same(cell),
        "validation": choice.score if choice else None,
        "validation_std": _validated(cell).std if choice else None,
        "test": test.mean if test else None,
        "test_std": test.std if test else None,
        "difference": _gap(cell),
        "tied": near(results, cell),
    }
