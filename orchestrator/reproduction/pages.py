"""Everything that is set beside the papers, and the pages that lead to it."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.report.tables.render import Table, markdown_rows, markdown_text
from orchestrator.reproduction import entries, others
from orchestrator.reproduction.findings import Finding
from orchestrator.reproduction.joining import Joined
from orchestrator.reproduction.ours import Ours


def tables(ours: Ours, joined: Sequence[Joined]) -> dict[str, Table]:
    """By the stem of their files; only those that there is something of ours for."""
    found: dict[str, Table] = {}
    for paper, number in dict.fromkeys((pair.paper, pair.table) for pair in joined):
        pairs = [pair for pair in joined if (pair.paper, pair.table) == (paper, number)]
        found[_stem(paper, number)] = entries.accuracy(paper, number, pairs)
    for number, table in others.mcnemar(ours).items():
        found[f"dp-fedsofim-table-{number}"] = table
    for stem, built in (
        ("table-13", others.partition(ours, 13)),
        ("table-14", others.partition(ours, 14)),
        ("table-7", others.runtime(ours)),
        ("stand-in", others.order(ours)),
    ):
        if built is not None:
            found[f"dp-fedsofim-{stem}"] = built
    if joined:
        found["winners"] = entries.winners(ours, joined)
    return found


def _stem(paper: str, number: int) -> str:
    return f"{paper.lower().replace(' ', '-')}{f'-table-{number}' if number else ''}"


def index(ours: Ours, joined: Sequence[Joined]) -> str:
    lines = ["# The papers' tables beside ours\n", "[Findings](findings.md) says what holds and what does not.\n"]
    for stem, table in tables(ours, joined).items():
        lines.append(f"- [{stem}]({stem}.md) ([CSV]({stem}.csv)): {markdown_text(table.summary)}")
    studies = ", ".join(results.study.name for results in ours.results)
    lines.append(f"\nBuilt from the ledgers of: {studies}. `fedsweep compare` builds it again, byte for byte.\n")
    return "\n".join(lines)


def whole(ours: Ours, joined: Sequence[Joined], found: Sequence[Finding], made: str) -> str:
    """One page for the documentation."""
    parts = ["# The papers beside ours\n"]
    parts.append(
        "Built by `fedsweep compare` from the ledgers of the packaged studies, not typed. `make data` and `make "
        "reproduce` make it again where there is a network, `make table3` the main paper's table 3 alone; CRC-5 comes "
        "from a file that no command makes. The error curves of the M-estimation paper are on a page of their own, "
        "[Estimation](estimation.md).\n"
    )
    if made:
        parts.append(f"{made}\n")
    parts.append("## Findings\n")
    parts += [finding.markdown() for finding in found]
    for table in tables(ours, joined).values():
        parts.append(f"## {markdown_text(table.title)}\n\n{markdown_text(table.caption)}\n\n{markdown_rows(table)}")
    return "\n".join(parts)
