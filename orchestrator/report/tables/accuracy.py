"""Test accuracy, or what else a study is judged by: by round, after the last one, and how many rounds it took."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from orchestrator.report.tables.common import (
    NAMES,
    bold_best,
    budget,
    mean_and_std,
    name_columns,
    named_rows,
    names,
    short_name,
    spread,
    unfinished,
)
from orchestrator.report.tables.render import NOTHING, Group, Table
from orchestrator.report.tables.results import CellResult, Results
from trainables.objective import ACCURACY, Objective

MAX_ROUND_COLUMNS = 10
BASELINE = "dp-fedgd"
SHARE = 0.95
ROUNDS = Objective("rounds", "rounds", "Rounds", form=".0f")


def accuracy(results: Results, setting: str) -> Table:
    """Form of tables 3 to 6, 8 and 9 of the DP-FedSOFIM paper."""
    objective, cells, evaluated = results.study.judged_by, results.of(setting), _evaluated_rounds(results)
    shown = _thinned(evaluated)
    groups = []
    for epsilon in results.study.epsilons:
        mine = results.of(setting, epsilon)
        columns = [_column(mine, [t] * len(mine)) for t in shown]
        groups.append(Group(budget(epsilon), named_rows(results, mine, zip(*columns, strict=True))))
    caption = [f"{objective.final}{objective.unit} by federated round, for each privacy budget ε: {spread(results)}."]
    caption.append("The best mean per ε and round is bold.")
    if len(shown) < len(evaluated):
        caption.append("Not every evaluated round is shown; the CSV file has them all.")
    records = [
        {**names(cell), "round": t, "mean": score.mean, "std": score.std, "seeds": score.seeds}
        for cell in cells
        for t, score in cell.curve.items()
    ]
    return Table(
        title=f"{objective.final} by round: {setting}",
        summary=f"{objective.final} of every method, round by round, at every privacy budget.",
        caption=" ".join([*caption, *_seed_notes(results, cells), *unfinished(cells)]),
        columns=[*name_columns(results), *(str(t) for t in shown)],
        align="l" * len(name_columns(results)) + "r" * len(shown),
        groups=groups,
        data=pd.DataFrame(records, columns=[*NAMES, "round", "mean", "std", "seeds"]),
    )


def final_accuracy(results: Results, setting: str) -> Table:
    """The last round alone, methods by budgets: the table to look at first."""
    objective, cells = results.study.judged_by, results.of(setting)
    by_budget = [results.of(setting, epsilon) for epsilon in results.study.epsilons]
    columns = [_column(mine, [cell.last for cell in mine]) for mine in by_budget]
    lasts = sorted({cell.last for cell in cells})
    when = f"after round {lasts[0]}" if len(lasts) == 1 else "after each method's last round"
    caption = f"{objective.final}{objective.unit} {when}: {spread(results)}. The best mean per ε is bold."
    return Table(
        title=f"{objective.final} {when}: {setting}",
        summary="",
        caption=" ".join([caption, *_seed_notes(results, cells)]),
        columns=[*name_columns(results), *(budget(epsilon) for epsilon in results.study.epsilons)],
        align="l" * len(name_columns(results)) + "r" * len(columns),
        groups=[Group("", named_rows(results, by_budget[0], zip(*columns, strict=True)))],
        data=pd.DataFrame(),
    )


def rounds_to_95(results: Results, setting: str) -> Table | None:
    """How soon a method is about as good as the plain one ends up; None if the plain one is not in the study, or where
    a share of its score means nothing."""
    baseline = next((method for method in results.study.methods if method.name == BASELINE), None)
    if baseline is None or results.study.judged_by is not ACCURACY:
        return None
    ways = [way.name for way in results.study.ways]
    plain = [cell for cell in results.of(setting) if cell.method == baseline]
    lasts = sorted({cell.last for cell in plain})
    when = f"after round {lasts[0]}" if len(lasts) == 1 else "after its last round"
    targets: dict[tuple[float, str], float] = {
        (cell.epsilon, cell.way): SHARE * cell.curve[cell.last].mean for cell in plain if cell.complete(cell.last)
    }
    columns, records = [], []
    for epsilon in results.study.epsilons:
        mine = results.of(setting, epsilon)
        firsts = [_first_round(cell, targets.get((epsilon, cell.way))) for cell in mine]
        columns.append(bold_best([NOTHING if t is None else str(t) for t in firsts], firsts, ROUNDS))
        records += [
            {**names(cell), "target": targets.get((epsilon, cell.way)), "round": t}
            for cell, t in zip(mine, firsts, strict=True)
        ]
    goals = []
    for way in ways:
        texts = [
            f"{targets[epsilon, way]:.2f}" if (epsilon, way) in targets else NOTHING
            for epsilon in results.study.epsilons
        ]
        goals.append(["accuracy to reach (%)", *([way] if results.both_ways else []), *texts])
    cells = results.of(setting)
    caption = (
        f"First evaluated round at which a method's mean test accuracy reaches {SHARE:.0%} of the mean that "
        f"{baseline.shown} has {when} at the same ε; {NOTHING}: never. Accuracy is evaluated every "
        f"{results.study.evaluate_every} rounds, so the true number may be lower by up to that. "
        "The fewest rounds per ε are bold."
    )
    first_rows = named_rows(results, results.of(setting, results.study.epsilons[0]), zip(*columns, strict=True))
    return Table(
        title=f"Rounds to {SHARE:.0%} of {baseline.shown}'s final accuracy: {setting}",
        summary=f"How many rounds each method needs to come close to where {baseline.shown} ends.",
        caption=" ".join([caption, *unfinished(cells)]),
        columns=[*name_columns(results), *(budget(epsilon) for epsilon in results.study.epsilons)],
        align="l" * len(name_columns(results)) + "r" * len(columns),
        groups=[Group("", goals), Group("", first_rows)],
        data=pd.DataFrame(records, columns=[*NAMES, "target", "round"]).astype({"round": "Int64"}),
    )


def _evaluated_rounds(results: Results) -> list[int]:
    every = results.study.evaluate_every
    lasts = [cell.last for cell in results.cells]
    return sorted({*range(every, max(lasts) + 1, every), *lasts})


def _thinned(rounds: list[int]) -> list[int]:
    """Few enough to print, evenly, the last among them."""
    step = math.ceil(len(rounds) / MAX_ROUND_COLUMNS)
    return rounds[::-1][::step][::-1]


def _column(cells: Sequence[CellResult], rounds: Sequence[int]) -> list[str]:
    """Every cell after a round of its own. A mean over fewer seeds may flatter its method, and so does too little
    noise: neither is ever in bold, nor is what runs as released."""
    texts, means = [], []
    for cell, t in zip(cells, rounds, strict=True):
        score, complete = cell.curve.get(t), cell.complete(t)
        texts.append(NOTHING if score is None else mean_and_std(score, cell.objective) + ("" if complete else " †"))
        counts = complete and cell.keeps_its_claim and not cell.method.as_released
        means.append(score.mean if score is not None and counts else None)
    return bold_best(texts, means, cells[0].objective) if cells else []


def _first_round(cell: CellResult, target: float | None) -> int | None:
    if target is None:
        return None
    return next((t for t, score in cell.curve.items() if cell.complete(t) and score.mean >= target), None)


def _seed_notes(results: Results, cells: Sequence[CellResult]) -> list[str]:
    """Which means lack a seed, and why."""
    short, without = [], []
    for cell in cells:
        lost = [f"seed {seed} {row.state}" for seed, row in cell.confirm.items() if row.state != "done"]
        if cell.confirm:
            lost += [f"seed {seed} has not ended" for seed in cell.seeds if seed not in cell.confirm]
        if lost:
            short.append(f"{short_name(cell, results)}: {', '.join(lost)}")
        if cell.search.choice is None and cell.search.states and not cell.missing:
            without.append(short_name(cell, results))
    notes = [f"† Over fewer seeds, and never bold ({'; '.join(short)})."] if short else []
    if without:
        notes.append(f"No configuration ran to its end: {', '.join(without)}.")
    return notes
