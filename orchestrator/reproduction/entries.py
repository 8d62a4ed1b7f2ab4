"""A paper's table of accuracies beside ours, and who wins where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from orchestrator.report.tables.common import budget
from orchestrator.report.tables.render import Bold, Group, Table
from orchestrator.reproduction.joining import FEDNEW, FEDSOFIM, HEART, LEAST, Joined, tuned_elsewhere
from orchestrator.reproduction.ours import Entry, Ours

PAPERS = {
    FEDSOFIM: "the DP-FedSOFIM paper (arXiv:2601.09166)",
    FEDNEW: "the DP-FedNew paper",
    HEART: "published for heart disease",
}
COLUMNS = (
    *("paper", "table", "setting", "epsilon", "method", "study", "ours", "search", "round", "paper_mean", "paper_std"),
    *("our_mean", "our_std", "difference", "allowed", "within", "epsilon_actual", "reason"),
)


def name_of(paper: str, number: int) -> str:
    return f"Table {number} of {PAPERS[paper]}" if number else f"Numbers {PAPERS[paper]}"


def accuracy(paper: str, number: int, pairs: Sequence[Joined]) -> Table:
    last = [pair for pair in pairs if pair.last]
    plain = [pair for pair in last if pair.stands and pair.entry.papers_way]
    groups = []
    for epsilon in sorted({pair.epsilon for pair in last}):
        rows = [_row(pair) for pair in last if pair.epsilon == epsilon]
        groups.append(Group(budget(epsilon), rows))
    caption = (
        "Test accuracy (%) after the last round: the paper's, ours, ours less the paper's. A difference counts as "
        f"none up to {LEAST:g} point or two standard deviations of the difference between a run of theirs and one of "
        "ours, whichever is more; others are bold. ε actual is what the noise that was really added is worth. "
        f"{counted(plain or last)} Study names that begin with paper- search as the paper says it did: by one seed, on "
        "validation rows. A difference without a reason is one that no rule could bear out with numbers."
    )
    columns = ["Method", "Study", "Search", "Paper", "Ours", "Difference", "ε actual", "Why"]
    if not any(pair.reason for pair in last):
        columns.pop()
        groups = [Group(group.heading, [row[:-1] for row in group.rows]) for group in groups]
    return Table(
        title=f"{name_of(paper, number)} beside ours: {_settings(pairs)}",
        summary=f"{name_of(paper, number)}, entry by entry.",
        caption=caption,
        columns=columns,
        align="lllrrrrp"[: len(columns)],
        groups=groups,
        data=pd.DataFrame([_record(pair) for pair in pairs], columns=COLUMNS),
    )


def counted(pairs: Sequence[Joined]) -> str:
    if not pairs:
        return ""
    within = sum(pair.within for pair in pairs)
    reasons = sum(1 for pair in pairs if not pair.within and pair.reason)
    text = f"{within} of {len(pairs)} entries agree"
    if reasons:
        text += f", {reasons} more differ for the reason given"
    left = len(pairs) - within - reasons
    return f"{text}{f', {left} without a reason given' if left else ''}."


def _row(pair: Joined) -> list[str]:
    difference = f"{pair.difference:+.2f}"
    return [
        pair.entry.label,
        pair.entry.study,
        pair.entry.strategy,
        _with_std(pair.paper_mean, pair.paper_std),
        _with_std(pair.our_mean, pair.our_std),
        difference if pair.within else Bold(difference),
        _epsilon(pair.entry.actual_epsilon),
        pair.reason,
    ]


def _record(pair: Joined) -> dict[str, Any]:
    entry = pair.entry
    values = (
        *(pair.paper, pair.table, entry.setting, entry.epsilon, pair.method, entry.study, entry.label, entry.strategy),
        *(pair.round, pair.paper_mean, pair.paper_std, pair.our_mean, pair.our_std, pair.difference),
        *(pair.allowed, pair.within, entry.actual_epsilon, pair.reason),
    )
    return dict(zip(COLUMNS, values, strict=True))


def _with_std(mean: float, std: float) -> str:
    return f"{mean:.2f}" if math.isnan(std) else f"{mean:.2f} ± {std:.2f}"


def _epsilon(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"


def _settings(pairs: Sequence[Joined]) -> str:
    return ", ".join(dict.fromkeys(pair.entry.setting for pair in pairs))


# ---- who wins


def best(entries: Sequence[Entry], t: int | None = None) -> list[Entry]:
    """The best of those that buy what they claim, and all that print the same."""
    there = [(entry, entry.mean(t)) for entry in entries if entry.honest]
    known = [(entry, round(mean, 2)) for entry, mean in there if mean is not None]
    top = max((mean for _, mean in known), default=math.nan)
    return [entry for entry, mean in known if mean == top]


def winners(ours: Ours, joined: Sequence[Joined]) -> Table:
    """Who is best after the last round, at every budget of every setting."""
    groups, records = [], []
    for study, setting in ours.settings:
        pairs = [pair for pair in joined if (pair.entry.study, pair.entry.setting) == (study, setting) and pair.last]
        rows = []
        for epsilon in dict.fromkeys(entry.epsilon for entry in ours.of(study=study, setting=setting)):
            entries = [e for e in ours.of(study=study, setting=setting, epsilon=epsilon) if not tuned_elsewhere(e)]
            mine = best(entries)
            theirs = {pair.method: pair.paper_mean for pair in pairs if pair.epsilon == epsilon}
            if not mine or len({entry.label for entry in entries}) < 2 or len(theirs) < 2:
                continue
            top = max(theirs.values())
            first = [name for name, mean in theirs.items() if mean == top]
            names, score = " and ".join(entry.label for entry in mine), mine[0].mean() or math.nan
            rows.append([budget(epsilon), " and ".join(first), f"{top:.2f}", names, f"{score:.2f}"])
            records.append(
                {
                    **{"study": study, "setting": setting, "epsilon": epsilon, "paper_best": " and ".join(first)},
                    **{"paper_mean": top, "our_best": names, "our_mean": score},
                }
            )
        if rows:
            groups.append(Group(f"{setting} ({study})", rows))
    return Table(
        title="Who wins where",
        summary="The best method after the last round at every budget, in the papers and here.",
        caption=(
            "The papers': of the methods that ran here. Ours: the best mean of those that buy the ε they claim; what "
            "runs as released is left out."
        ),
        columns=["Budget", "Paper's best", "Accuracy (%)", "Our best", "Accuracy (%)"],
        align="llrlr",
        groups=groups,
        data=pd.DataFrame(records),
    )
