"""Compare results folders with the papers and write the tables, the findings and an index."""

import os
from collections.abc import Sequence
from pathlib import Path

from orchestrator.report.tables.render import Table, markdown_text, to_csv, to_markdown, write_text
from orchestrator.reproduction.accuracy_table import accuracy_table
from orchestrator.reproduction.crc5_table import crc5_table
from orchestrator.reproduction.findings import all_findings, findings_page
from orchestrator.reproduction.matching import Match, match_papers
from orchestrator.reproduction.mcnemar_table import mcnemar_table
from orchestrator.reproduction.our_results import OurResults, read_results
from orchestrator.reproduction.paper_tables import file_stem
from orchestrator.reproduction.partition_table import partition_table
from orchestrator.reproduction.reasons import explain
from orchestrator.reproduction.runtime_table import runtime_table
from orchestrator.reproduction.summary_page import summary_page
from orchestrator.reproduction.winners_table import winners_table


def write_comparison(folders: Sequence[Path], to: Path, page: Path | None = None, made: str = "") -> list[Path]:
    """Compare results folders with the papers: a page and a CSV file per table, the findings, and an index.

    Args:
        folders: Results folders, or folders that contain results folders.
        to: The folder to write to.
        page: Where to write a summary of everything, with links to the files in `to`.
        made: How the results were made, for the summary.
    """
    results = read_results(folders)
    matches = explain(match_papers(results), results)
    tables = comparison_tables(results, matches)
    findings = all_findings(results, matches)
    texts = {f"{stem}.md": to_markdown(table) for stem, table in tables.items()}
    texts |= {f"{stem}.csv": to_csv(table) for stem, table in tables.items()}
    texts |= {"findings.md": findings_page(findings), "README.md": _index(tables, results.studies)}
    written = [write_text(to / name, text) for name, text in texts.items()]
    if page is not None:
        links = os.path.relpath(to, page.parent)
        written.append(write_text(page, summary_page(matches, tables, findings, made, links)))
    return written


def comparison_tables(results: OurResults, matches: Sequence[Match]) -> dict[str, Table]:
    """By file name without suffix. Tables without any result of ours are left out."""
    tables: dict[str, Table | None] = {}
    for paper, number in dict.fromkeys((match.paper, match.table) for match in matches):
        same_table = [match for match in matches if (match.paper, match.table) == (paper, number)]
        tables[file_stem(paper, number)] = accuracy_table(same_table)
    tables |= {
        "dp-fedsofim-crc5": crc5_table(results),
        "dp-fedsofim-table-7": runtime_table(results),
        "dp-fedsofim-table-13": partition_table(results, 13),
        "dp-fedsofim-table-14": partition_table(results, 14),
        "dp-fedsofim-table-15": mcnemar_table(results, 15),
        "dp-fedsofim-table-16": mcnemar_table(results, 16),
        "winners": winners_table(results, matches) if matches else None,
    }
    return {stem: table for stem, table in tables.items() if table is not None}


def _index(tables: dict[str, Table], studies: Sequence[str]) -> str:
    lines = [f"- [{stem}]({stem}.md) ([CSV]({stem}.csv)): {markdown_text(t.summary)}" for stem, t in tables.items()]
    return "\n".join(
        [
            "# The papers' tables and our results\n",
            "[Findings](findings.md) lists the papers' claims and whether they hold.\n",
            *lines,
            f"\nComputed from the ledgers of: {', '.join(studies)}. `fedsweep compare` rebuilds it byte for byte.\n",
        ]
    )
