"""A paper's table of accuracies next to ours."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd

from orchestrator.report.tables.common import budget
from orchestrator.report.tables.render import Bold, Group, Table
from orchestrator.reproduction.matching import MIN_TOLERANCE, Match
from orchestrator.reproduction.paper_tables import table_name


def accuracy_table(matches: Sequence[Match]) -> Table:
    """`matches`: all of one table."""
    name = table_name(matches[0].paper, matches[0].table)
    final = [match for match in matches if match.final]
    budgets = sorted({match.epsilon for match in final})
    columns = ["Method", "Study", "Search", "Paper", "Ours", "Difference", "Actual ε", "Reason"]
    if not any(match.reason for match in final):
        columns.pop()
    counts = agreement([match for match in final if match.comparable and match.ours.paper_search] or final)
    return Table(
        title=f"{name} and our results: {', '.join(dict.fromkeys(match.ours.setting for match in matches))}",
        summary=f"{name}: {counts}",
        caption=(
            "Test accuracy (%) after the last round, and ours minus the paper's. Bold: a difference of more than "
            f"{MIN_TOLERANCE:g} point and more than two standard deviations of the difference between one run of "
            "theirs and one of ours. Actual ε is computed from the noise that was really added. "
            f"{counts} Studies named paper-... search as the paper describes: one seed, on validation rows. A bold "
            "difference without a reason is one that none of our numbers explains."
        ),
        columns=columns,
        align="lllrrrrp"[: len(columns)],
        groups=[Group(budget(e), [_row(m)[: len(columns)] for m in final if m.epsilon == e]) for e in budgets],
        data=pd.DataFrame([_record(match) for match in matches]),
    )


def agreement(matches: Sequence[Match]) -> str:
    """How many entries agree, and how many differ for which reason."""
    kinds = Counter(match.reason_kind for match in matches if not match.agrees and match.reason)
    agree, explained = sum(match.agrees for match in matches), kinds.total()
    text = f"{agree} of {len(matches)} entries agree"
    if explained:
        reasons = "; ".join(f"{kind}: {count}" for kind, count in kinds.most_common())
        text += f", {_differ(explained)} with a likely reason ({reasons})"
    if unexplained := len(matches) - agree - explained:
        text += f", {_differ(unexplained)} without an explanation"
    return f"{text}."


def _differ(count: int) -> str:
    return "1 differs" if count == 1 else f"{count} differ"


def _row(match: Match) -> list[str]:
    difference, actual = f"{match.difference:+.2f}", match.ours.actual_epsilon
    return [
        *(match.ours.label, match.ours.study, match.ours.strategy),
        _with_std(match.paper_mean, match.paper_std),
        _with_std(match.our_mean, match.our_std),
        difference if match.agrees else Bold(difference),
        "∞" if math.isinf(actual) else f"{actual:.3g}",
        match.reason,
    ]


def _with_std(mean: float, std: float) -> str:
    return f"{mean:.2f}" if math.isnan(std) else f"{mean:.2f} ± {std:.2f}"


def _record(match: Match) -> dict[str, Any]:
    ours = match.ours
    return {
        **{"paper": match.paper, "table": match.table, "setting": ours.setting, "epsilon": ours.epsilon},
        **{"method": match.method, "study": ours.study, "our_method": ours.label, "search": ours.strategy},
        **{"round": match.round, "paper_mean": match.paper_mean, "paper_std": match.paper_std},
        **{"our_mean": match.our_mean, "our_std": match.our_std, "difference": match.difference},
        **{"tolerance": match.tolerance, "agrees": match.agrees, "epsilon_actual": ours.actual_epsilon},
        "reason": match.reason,
    }
