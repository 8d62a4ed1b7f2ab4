"""Tables of the test score by round and after the last round, and of the rounds to reach 95% of the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import pairwise
from statistics import median

from orchestrator.report.tables import option_effects
from orchestrator.report.tables.common import (
    UNKNOWN,
    CellRow,
    bold_best,
    budget,
    cell_table,
    mean_and_std,
    short_name,
    spread,
    thinned,
    unfinished,
)
from orchestrator.report.tables.differences import can_lead, difference, tied_for_best
from orchestrator.report.tables.render import NOTHING, Bold, Group, Table
from orchestrator.report.tables.tuning import edges, tied_count
from orchestrator.results.winners import CellResult, Results, Score
from orchestrator.search.objective import ACCURACY, Objective
from orchestrator.search.variant import SECRET

MAX_ROUND_COLUMNS = 10
BASELINE = "dp-fedgd"
SHARE = 0.95
ROUNDS = Objective("rounds", "rounds", "Rounds", format_spec=".0f")


def accuracy(results: Results, setting: str) -> Table:
    """The test score by round, in the form of tables 3 to 6, 8 and 9 of the DP-FedSOFIM paper."""
    objective, cells, evaluated = results.study.objective_spec, results.of(setting), _evaluated_rounds(results)
    printed = printed_rounds(evaluated, {cell.last for cell in cells})
    groups = []
    for epsilon in results.study.epsilons:
        mine = results.of(setting, epsilon)
        groups.append((budget(epsilon), _rows(mine, [_column(mine, [t] * len(mine)) for t in printed])))
    caption = [
        f"{objective.test_title}{objective.unit} by federated round at each privacy budget ε: {spread(results)}.",
        f"Bold, per ε and round: {_bold_rule(results)}.",
    ]
    if len(printed) < len(evaluated):
        caption.append("Not every evaluated round is shown; the CSV file has all of them.")
    return cell_table(
        results,
        setting,
        title=f"{objective.test_title} by round",
        summary=f"{objective.test_title} of every method by round, at every privacy budget.",
        caption=[*caption, *_notes(results, setting), *unfinished(cells)],
        columns={str(t): "r" for t in printed},
        groups=groups,
        records=[(cell, {"round": t, **score._asdict()}) for cell in cells for t, score in cell.curve.items()],
        fields=("round", *Score._fields),
    )


def final_accuracy(results: Results, setting: str) -> Table:
    """The test score after the last round, methods by budgets: the main table."""
    objective = results.study.objective_spec
    by_budget = [results.of(setting, epsilon) for epsilon in results.study.epsilons]
    columns = [_column(mine, [cell.last for cell in mine]) for mine in by_budget]
    lasts = sorted({cell.last for cell in results.of(setting)})
    when = f"after round {lasts[0]}" if len(lasts) == 1 else "after each method's last round"
    caption = f"{objective.test_title}{objective.unit} {when}: {spread(results)}. Bold, per ε: {_bold_rule(results)}."
    return cell_table(
        results,
        setting,
        title=f"{objective.test_title} {when}",
        summary=f"{objective.test_title} of every method at every privacy budget.",
        caption=[caption, *_notes(results, setting)],
        columns={budget(epsilon): "r" for epsilon in results.study.epsilons},
        groups=[("", _rows(by_budget[0], columns))],
        records=[],
    )


def rounds_to_95(results: Results, setting: str) -> Table | None:
    """The first round at which each method reaches 95% of the baseline's final accuracy. None if the study lacks the
    baseline, or if the objective is not accuracy: 95% of a loss would be no meaningful target."""
    baseline = next((method for method in results.study.methods if method.name == BASELINE), None)
    if baseline is None or results.study.objective_spec is not ACCURACY:
        return None
    epsilons, cells = results.study.epsilons, results.of(setting)
    baselines = [cell for cell in cells if cell.method == baseline]
    lasts = sorted({cell.last for cell in baselines})
    when = f"after round {lasts[0]}" if len(lasts) == 1 else "after its last round"
    targets: dict[tuple[float, str], float] = {
        (cell.epsilon, cell.variant.name): SHARE * cell.curve[cell.last].mean
        for cell in baselines
        if cell.complete(cell.last)
    }
    columns, records = [], []
    for epsilon in epsilons:
        mine = results.of(setting, epsilon)
        firsts = [_first_round(cell, targets.get((epsilon, cell.variant.name))) for cell in mine]
        leading = [t if can_lead(cell) else None for cell, t in zip(mine, firsts, strict=True)]
        columns.append(bold_best([NOTHING if t is None else str(t) for t in firsts], leading, ROUNDS))
        records += [
            (cell, {"target": targets.get((epsilon, cell.variant.name)), "round": t})
            for cell, t in zip(mine, firsts, strict=True)
        ]
    target_rows = []
    for strategy in (variant.name for variant in results.study.variants):
        found = [targets.get((epsilon, strategy)) for epsilon in epsilons]
        texts = [NOTHING if target is None else f"{target:.2f}" for target in found]
        target_rows.append(["target accuracy (%)", *([strategy] if results.several_strategies else []), *texts])
    every = results.study.evaluate_every
    caption = (
        f"First evaluated round at which a method's mean test accuracy reaches {SHARE:.0%} of the mean that "
        f"{baseline.shown} has {when} at the same ε; {NOTHING}: never. Accuracy is evaluated every {every} rounds, so "
        f"the exact round may be up to {every} rounds earlier. Bold: the fewest rounds per ε."
    )
    table = cell_table(
        results,
        setting,
        title=f"Rounds to {SHARE:.0%} of {baseline.shown}'s final accuracy",
        summary=f"How many rounds each method needs to reach {SHARE:.0%} of {baseline.shown}'s final accuracy.",
        caption=[caption, *unfinished(cells)],
        columns={budget(epsilon): "r" for epsilon in epsilons},
        groups=[("", _rows(results.of(setting, epsilons[0]), columns))],
        records=records,
    )
    return replace(table, groups=[Group("", target_rows), *table.groups])


def _notes(results: Results, setting: str) -> list[str]:
    adaptive = any("adaptive" in method.own_options for method in results.study.methods if not method.label)
    return [
        *(["adaptive: features scaled and centred privately, clients weighted by their rows."] if adaptive else []),
        *_seed_notes(results, results.of(setting)),
        *option_effects.sentences(results, setting),
        *not_monotone(results, setting),
        *_stability(results, setting),
    ]


def _stability(results: Results, setting: str) -> list[str]:
    """A sentence on how stable the choice of the configurations is; none for a private search, which shows only the
    winner, and where nothing was searched."""
    found = [] if results.study.private else [c for c in results.of(setting) if c.search.configurations > 1]
    if results.study.search.finalists == 1:  # a contest of one configuration says nothing
        found = [cell for cell in found if not cell.variant.has_contest]
    counts = [count for cell in found if (count := tied_count(cell)) is not None]
    if not counts:
        return []
    others = [count - 1 for count in counts if count > 1]
    if not others:
        return [
            "Stability of the choice: no other configuration of the deciding stage was within one standard error of a "
            "winner."
        ]
    cells = "the only cell" if len(counts) == 1 else f"{len(others)} of {len(counts)} cells"
    return [
        f"Stability of the choice: in {cells} other configurations (median: {median(others):g}) were within one "
        "standard error of the best, so another search seed or processor may choose another one."
    ]


def _bold_rule(results: Results) -> str:
    if len(results.study.seeds.confirm) == 1:
        return "the best score, and every score that is printed as the same number"
    return (
        "the best mean, and all that do not differ significantly from it (paired t-test over the seeds at 5%, Holm's "
        "correction over the methods)"
    )


def not_monotone(results: Results, setting: str) -> list[str]:
    """Sentences on cells that score significantly worse than the same method at the next smaller budget, with the
    likely cause. Less noise alone should never reduce a score."""
    objective, sentences = results.study.objective_spec, []
    for method in results.study.methods:
        for strategy in results.study.variants:
            cells = [
                c for c in results.of(setting) if c.method == method and c.variant.name == strategy.name and can_lead(c)
            ]
            for small, large in pairwise(sorted(cells, key=lambda cell: cell.epsilon)):
                gap = difference(small, large)
                if gap and gap.clear and objective.cost(gap.mean) < 0:
                    sentences.append(
                        f"{short_name(large, results)} is {objective.format(abs(gap.mean))} worse than at "
                        f"{budget(small.epsilon)}, a significant difference over the seeds: {_why(small, large)}."
                    )
    return sentences


def _why(small: CellResult, large: CellResult) -> str:
    """Why the search at the larger budget chose a worse configuration."""
    edge = edges(large)
    if edge:
        return f"its winner lies on an edge of the search space ({', '.join(edge)})"
    better, worse = small.search.choice, large.search.choice
    if better and worse and large.objective.cost(better.score) < large.objective.cost(worse.score):
        return "its search found nothing as good as the smaller budget's"
    if worse and worse.candidate.keys[1:] == ():
        return "it was chosen on one seed, which overrated it on the validation rows"
    return "on the validation rows it was not worse, so validation and test rows disagree"


def _evaluated_rounds(results: Results) -> list[int]:
    every = results.study.evaluate_every
    lasts = [cell.last for cell in results.cells]
    return sorted({*range(every, max(lasts) + 1, every), *lasts})


def printed_rounds(evaluated: Sequence[int], lasts: AbstractSet[int]) -> list[int]:
    """At most `MAX_ROUND_COLUMNS` rounds: the last rounds of all cells, unless they would take more than half of the
    columns, and evenly spaced ones."""
    spaced = thinned(evaluated, MAX_ROUND_COLUMNS)
    if lasts <= set(spaced) or 2 * len(lasts) > MAX_ROUND_COLUMNS:
        return spaced
    others = [t for t in evaluated if t not in lasts]
    return sorted({*lasts, *thinned(others, MAX_ROUND_COLUMNS - len(lasts))})


def _rows(cells: Sequence[CellResult], columns: Sequence[Sequence[str]]) -> list[CellRow]:
    return list(zip(cells, zip(*columns, strict=True), strict=True))


def _column(cells: Sequence[CellResult], rounds: Sequence[int]) -> list[str]:
    """The score of each cell after the given round. Never bold: means over fewer seeds, cells with less noise than
    their claim needs, and methods run as their authors released them."""
    texts = []
    for cell, t in zip(cells, rounds, strict=True):
        mark = " †" if t in cell.curve and not cell.complete(t) else ""
        texts.append(mean_and_std(cell.curve.get(t, UNKNOWN), cell.objective) + mark)
    bold = tied_for_best(cells, rounds) if cells else []
    return [Bold(text) if best else text for text, best in zip(texts, bold, strict=True)]


def _first_round(cell: CellResult, target: float | None) -> int | None:
    if target is None:
        return None
    return next((t for t, score in cell.curve.items() if cell.complete(t) and score.mean >= target), None)


def _seed_notes(results: Results, cells: Sequence[CellResult]) -> list[str]:
    """Notes on means that lack a seed, and on cells without a winner."""
    short, without = [], []
    for cell in cells:
        lost = [
            row.state if seed == SECRET else f"seed {seed} {row.state}"
            for seed, row in cell.confirm.items()
            if row.state != "done"
        ]
        if cell.confirm:
            lost += [f"seed {seed} is not finished" for seed in cell.seeds if seed not in cell.confirm]
        if lost:
            short.append(f"{short_name(cell, results)}: {', '.join(lost)}")
        if cell.search.choice is None and cell.search.states and not cell.search.missing:
            without.append(short_name(cell, results))
    notes = [f"† Mean over fewer seeds, never bold ({'; '.join(short)})."] if short else []
    if without:
        notes.append(f"Every search trial diverged or failed: {'; '.join(without)}.")
    return notes
