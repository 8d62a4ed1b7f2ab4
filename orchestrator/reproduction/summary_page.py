"""The summary for the documentation."""

from collections.abc import Mapping, Sequence

import pandas as pd

from orchestrator.report.tables.common import budget
from orchestrator.report.tables.render import Bold, Group, Table, markdown_rows, markdown_text
from orchestrator.reproduction.findings import Finding
from orchestrator.reproduction.findings.privacy_claims import CLAIM
from orchestrator.reproduction.matching import Match
from orchestrator.reproduction.paper_tables import (
    CITATION,
    FEDSOFIM,
    table_name,
)

COMMANDS = """\
```
make data        # download the data sets and compute their features
make table3      # the main paper's table 3 only
make reproduce   # every study whose data is available, all comparisons, and this page
```

One study alone: `fedsweep run paper-cifar10-resnet20`, then `fedsweep compare results/paper-cifar10-resnet20`.
An interrupted `make reproduce` continues where it stopped. `python -m benchmarks.reproduce --help` lists options for
some of the studies, for a time limit, and for several studies at the same time.
"""


def summary_page(
    matches: Sequence[Match], tables: Mapping[str, Table], findings: Sequence[Finding], made: str, links: str
) -> str:
    """`links`: path from this page to the folder with the detailed pages."""
    parts = [
        "# The papers' results and ours\n",
        "This page summarises how the results that the papers publish compare with ours. `fedsweep compare` computes "
        "it from the ledgers of the packaged studies; no number is typed by hand. The details are in "
        f"[the tables, entry by entry]({links}/README.md) and [the findings with all their evidence]"
        f"({links}/findings.md). The M-estimation paper has its own page, [Estimation](estimation.md).\n",
        "An entry *agrees* if our number differs from the paper's by at most one point, or by at most two standard "
        "deviations of the difference between one run of theirs and one of ours. *The papers' search* has one seed and "
        "the papers' grids. *Our search* has several seeds, grids that refine, and a contest of the best "
        "configurations on fresh seeds. Neither uses the test rows. A *regime* is one setting (data set and "
        "partition) at one ε, and it is *tight* if ε ≤ 1. *As released* means that a baseline runs as in its authors' "
        "program; all other numbers have the noise that their ε requires.\n",
    ]
    if headline := [m for m in matches if (m.paper, m.table) == (FEDSOFIM, 3) and m.final and m.ours.plain]:
        parts += [f"## {table_name(FEDSOFIM, 3)} ({CITATION})\n", _headline(headline)]
    parts += ["## Every table\n", *(_table_line(stem, table, links) for stem, table in tables.items())]
    parts.append("\n## Main findings\n")
    parts += [f"- *{f.claim}.* {f.bold_verdict} {f.evidence[0]}" for f in findings if f.claim != CLAIM]
    for finding in findings:
        if finding.claim == CLAIM:
            parts += [
                "\n## Privacy of the released baselines\n",
                f"*{finding.claim}.* {finding.bold_verdict} [Privacy](privacy.md) explains the causes.\n",
                *(f"- {sentence}" for sentence in finding.evidence),
            ]
    return "\n".join([*parts, "\n## Reproduce it\n", COMMANDS, *([f"{made}\n"] if made else [])])


def _headline(matches: Sequence[Match]) -> str:
    """The paper's and our final accuracy, with the papers' search where there is such a study."""
    shown = [match for match in matches if match.ours.paper_search] or matches
    budgets = sorted({match.epsilon for match in shown})
    rows = []
    for method in dict.fromkeys(match.method for match in shown):
        row = [method]
        for epsilon in budgets:
            match = next((m for m in shown if (m.method, m.epsilon) == (method, epsilon)), None)
            ours = f"{match.our_mean:.2f}" if match else ""
            row += [f"{match.paper_mean:.2f}" if match else "", ours if not match or match.agrees else Bold(ours)]
        rows.append(row)
    columns = ["Method", *(f"{budget(epsilon)}, {who}" for epsilon in budgets for who in ("paper", "ours"))]
    table = Table("", "", "", columns, "l" + "r" * (len(columns) - 1), [Group("", rows)], pd.DataFrame())
    settings = ", ".join(dict.fromkeys(match.ours.setting for match in shown))
    return f"Test accuracy (%) after the last round, {settings}. Bold: ours does not agree.\n\n{markdown_rows(table)}"


def _table_line(stem: str, table: Table, links: str) -> str:
    name, _, result = table.summary.partition(": ")
    return f"- [{markdown_text(name)}]({links}/{stem}.md): {markdown_text(result)}"
