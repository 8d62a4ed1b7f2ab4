"""How every winner was chosen: what one seed would have chosen, and how its validation score compares with test."""

from __future__ import annotations

from statistics import fmean

from orchestrator.report.tables.common import UNKNOWN, by_budget, cell_table, mean_and_std, unfinished
from orchestrator.report.tables.render import NOTHING, Table
from orchestrator.report.tables.tuning import configuration_text, tied_count, validation_score
from orchestrator.results.winners import CellResult, Results


def selection(results: Results, setting: str) -> Table | None:
    """None for a private search, which shows only the winner."""
    if results.study.private:
        return None
    objective, cells = results.study.objective_spec, results.of(setting)
    caption = (
        f"Validation and Test{objective.unit}: mean ± sample standard deviation of the chosen configuration over the "
        "seeds that decided and over the confirm seeds. Difference: validation minus test. "
        "Tied: configurations, including the winner, within one standard error of the best."
    )
    return cell_table(
        results,
        setting,
        title="How winners were chosen",
        summary="What one seed would have chosen, what was chosen, and how validation compares with test.",
        caption=[caption, *_validation_against_test(results, cells), *_surfaces(results, setting), *unfinished(cells)],
        columns={
            **{"Best on one seed": "p", "Chosen": "p"},
            **dict.fromkeys(["Validation", "Test", "Difference", "Tied"], "r"),
        },
        groups=by_budget(results, setting, _row),
        records=[(cell, _record(cell)) for cell in cells],
    )


def _validation_against_test(results: Results, cells: list[CellResult]) -> list[str]:
    """Sentences on validation minus test. A difference common to all cells is not selection bias: the validation rows
    are harder or easier."""
    gaps = [gap for cell in cells if (gap := _gap(cell)) is not None]
    if len(gaps) < 2:
        return []
    shown, mean = results.study.objective_spec.format, fmean(gaps)
    more = " and from the additional rows that confirm trains on" if results.study.confirm_train_on == "all" else ""
    sentences = [
        f"Averaged over all cells, validation is {shown(abs(mean))} {'above' if mean > 0 else 'below'} test "
        f"({shown(min(gaps))} to {shown(max(gaps))}). The common part comes from the choice of validation rows{more}, "
        "and more seeds do not remove it; the variation between cells is chance and selection bias."
    ]
    changed = [cell for cell in cells if cell.search.by_one_seed not in (None, cell.search.chosen)]
    if changed:
        sentences.append(f"In {len(changed)} of {len(cells)} cells one seed would have chosen another configuration.")
    return sentences


def _surfaces(results: Results, setting: str) -> list[str]:
    """The surface of every method: what it expects at the searched budgets, and where its predictions were wrong."""
    shown, sentences = results.study.objective_spec.format, []
    for surface in results.surfaces:
        if surface.setting != setting:
            continue
        points = [surface.at(epsilon) for epsilon in surface.epsilons]
        expected = ", ".join(f"{shown(p.score)} ± {shown(2 * p.deviation)} at ε = {p.epsilon:g}" for p in points)
        sentences.append(
            f"Surface of {surface.method.shown}: it expects a best validation score (± two standard deviations) of "
            f"{expected}."
        )
        finalists = surface.finalists
        if finalists:
            errors = [abs(finalist.predicted - finalist.score) for finalist in finalists]
            worst = finalists[errors.index(max(errors))]
            inside = sum(error <= 2 * f.deviation for error, f in zip(errors, finalists, strict=True))
            sentences.append(
                f"Before the contests it predicted the scores of {len(finalists)} finalists with a mean error of "
                f"{shown(fmean(errors))}, {inside} of them within two standard deviations; the largest error is "
                f"{shown(max(errors))}, at ε = {worst.epsilon:g} ({shown(worst.predicted)} predicted, "
                f"{shown(worst.score)} found)."
            )
    return sentences


def _gap(cell: CellResult) -> float | None:
    choice = cell.search.choice
    return choice.score - cell.curve[cell.last].mean if choice and cell.complete(cell.last) else None


def _row(cell: CellResult) -> list[str]:
    gap, tied = _gap(cell), tied_count(cell)
    return [
        "the same" if _same(cell) else configuration_text(cell, cell.search.by_one_seed),
        configuration_text(cell, cell.search.chosen),
        mean_and_std(validation_score(cell), cell.objective),
        mean_and_std(cell.curve.get(cell.last, UNKNOWN), cell.objective),
        NOTHING if gap is None else cell.objective.format(gap),
        NOTHING if tied is None else str(tied),
    ]


def _same(cell: CellResult) -> bool | None:
    """Whether one seed would have chosen the winner; None without a winner."""
    return None if cell.search.chosen is None else cell.search.by_one_seed == cell.search.chosen


def _record(cell: CellResult) -> dict[str, object]:
    validation, test = validation_score(cell), cell.curve.get(cell.last, UNKNOWN)
    return {
        "one_seed": configuration_text(cell, cell.search.by_one_seed),
        "chosen": configuration_text(cell, cell.search.chosen),
        "same": _same(cell),
        "validation": validation.mean,
        "validation_std": validation.std,
        "test": test.mean,
        "test_std": test.std,
        "difference": _gap(cell),
        "tied": tied_count(cell),
    }
