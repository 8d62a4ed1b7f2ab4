"""Test accuracy, or what else a study is judged by: by round, after the last one, and how many rounds it took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pandas as pd

from orchestrator.report.tables import option_effects
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
from orchestrator.report.tables.differences import counts, difference, tied_for_best
from orchestrator.report.tables.render import NOTHING, Bold, Group, Table
from orchestrator.report.tables.tuning import edges
from orchestrator.results.winners import CellResult, Results
from orchestrator.study.objective import ACCURACY, Objective
from orchestrator.study.settings import SECRET

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
    caption.append(f"Bold, per ε and round: {_best(results)}.")
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
        caption=" ".join([*caption, *_notes(results, setting), *unfinished(cells)]),
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
    caption = f"{objective.final}{objective.unit} {when}: {spread(results)}. Bold, per ε: {_best(results)}."
    return Table(
        title=f"{objective.final} {when}: {setting}",
        summary="",
        caption=" ".join([caption, *_notes(results, setting)]),
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
    strategies = [strategy.name for strategy in results.study.strategies]
    plain = [cell for cell in results.of(setting) if cell.method == baseline]
    lasts = sorted({cell.last for cell in plain})
    when = f"after round {lasts[0]}" if len(lasts) == 1 else "after its last round"
    targets: dict[tuple[float, str], float] = {
        (cell.epsilon, cell.strategy): SHARE * cell.curve[cell.last].mean for cell in plain if cell.complete(cell.last)
    }
    columns, records = [], []
    for epsilon in results.study.epsilons:
        mine = results.of(setting, epsilon)
        firsts = [_first_round(cell, targets.get((epsilon, cell.strategy))) for cell in mine]
        leading = [t if counts(cell) else None for cell, t in zip(mine, firsts, strict=True)]
        columns.append(bold_best([NOTHING if t is None else str(t) for t in firsts], leading, ROUNDS))
        records += [
            {**names(cell), "target": targets.get((epsilon, cell.strategy)), "round": t}
            for cell, t in zip(mine, firsts, strict=True)
        ]
    goals = []
    for strategy in strategies:
        texts = [
            f"{targets[epsilon, strategy]:.2f}" if (epsilon, strategy) in targets else NOTHING
            for epsilon in results.study.epsilons
        ]
        goals.append(["accuracy to reach (%)", *([strategy] if results.several_strategies else []), *texts])
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


def _notes(results: Results, setting: str) -> list[str]:
    return [
        *_seed_notes(results, results.of(setting)),
        *option_effects.in_words(results, setting),
        *not_monotone(results, setting),
    ]


def _best(results: Results) -> str:
    """What stands in bold, in words."""
    if len(results.study.seeds.confirm) == 1:
        return "the best score, and all that print the same"
    return (
        "the best mean, and all that the seeds cannot tell from it (paired t-test at 5%, Holm's correction over the "
        "methods)"
    )


def not_monotone(results: Results, setting: str) -> list[str]:
    """More noise should not help: where a larger budget did worse than a smaller one by more than its seeds explain,
    and what the ledger knows of it."""
    objective, found = results.study.judged_by, []
    for method in results.study.methods:
        for strategy in results.study.strategies:
            cells = [c for c in results.of(setting) if c.method == method and c.strategy == strategy.name and counts(c)]
            for small, large in pairwise(sorted(cells, key=lambda cell: cell.epsilon)):
                gap = difference(small, large)
                if gap and gap.clear and objective.cost(gap.mean) < 0:
                    found.append(
                        f"{short_name(large, results)} did worse than at {budget(small.epsilon)} by "
                        f"{objective.shown(abs(gap.mean))}, more than its seeds explain: {_why(small, large)}."
                    )
    return found


def _why(small: CellResult, large: CellResult) -> str:
    """Why the search at the larger budget missed what the one at the smaller budget found."""
    edge = edges(large)
    if edge:
        return f"its winner sits on an edge of what was tried ({', '.join(edge)})"
    better, worse = small.search.choice, large.search.choice
    if better and worse and large.objective.cost(better.score) < large.objective.cost(worse.score):
        return "its search did not find what the smaller budget's found"
    if worse and worse.contender.keys[1:] == ():
        return "one seed chose it, and overrated it on the validation rows"
    return "on the validation rows it was not behind, so the two sets of rows disagree"


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
    texts = []
    for cell, t in zip(cells, rounds, strict=True):
        score = cell.curve.get(t)
        mark = "" if cell.complete(t) else " †"
        texts.append(NOTHING if score is None else mean_and_std(score, cell.objective) + mark)
    marked = tied_for_best(cells, rounds) if cells else []
    return [Bold(text) if best else text for text, best in zip(texts, marked, strict=True)]


def _first_round(cell: CellResult, target: float | None) -> int | None:
    if target is None:
        return None
    return next((t for t, score in cell.curve.items() if cell.complete(t) and score.mean >= target), None)


def _seed_notes(results: Results, cells: Sequence[CellResult]) -> list[str]:
    """Which means lack a seed, and why."""
    short, without = [], []
    for cell in cells:
        lost = [
            row.state if seed == SECRET else f"seed {seed} {row.state}"
            for seed, row in cell.confirm.items()
            if row.state != "done"
        ]
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
