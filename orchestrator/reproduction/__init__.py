"""The papers' tables beside ours: their numbers as data, ours from the ledgers, the difference and what it means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.report.tables import render
from orchestrator.reproduction import findings, pages
from orchestrator.reproduction.joining import Joined, join
from orchestrator.reproduction.ours import Ours, read


def write_comparison(folders: Sequence[Path], to: Path, page: Path | None = None, made: str = "") -> list[Path]:
    """Write what result folders come to beside the papers: a table per paper's table, the findings, an index. `page`:
    one page of all that, for the documentation; `made`: how the ledgers came about, for that page."""
    ours = read(folders)
    joined = join(ours)
    written: list[Path] = []
    for stem, table in pages.tables(ours, joined).items():
        written += [
            render.write_text(to / f"{stem}.md", render.to_markdown(table)),
            render.write_text(to / f"{stem}.csv", render.to_csv(table)),
        ]
    found = findings.findings(ours, joined)
    written.append(render.write_text(to / "findings.md", findings.page(found)))
    written.append(render.write_text(to / "README.md", pages.index(ours, joined)))
    if page is not None:
        written.append(render.write_text(page, pages.whole(ours, joined, found, made)))
    return written


__all__ = ["Joined", "Ours", "join", "read", "write_comparison"]
