"""report.html: all results of one ledger, or of several, in one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.report.html import data, document
from orchestrator.report.tables.render import one_line, write_text
from orchestrator.results import status
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import results_location
from trainables.errors import UserError
from trainables.urls import shown_url

NAME = "report.html"
MOST_COMPARED = 8  # number of colours and markers in the palette


def write_report(results: Sequence[str], output: Path | None = None) -> str:
    """Write the page to `output`, by default into the first results folder; return its address."""
    if len(results) > MOST_COMPARED:
        raise UserError(f"{len(results)} results folders are more than the {MOST_COMPARED} that can be compared")
    text = document.page(document.content(read(results)))
    if output is not None:
        return str(write_text(output, text))
    where = results_location(results[0])
    with where.open_for_reading() as folder:
        path = write_text(folder / NAME, text)
        where.upload_tables()
        return where.address_of(path)


def read(results: Sequence[str], memory: data.Memory | None = None) -> list[dict[str, Any]]:
    """The page's data for every results folder, under distinct names. `memory` avoids recomputing unchanged cells when
    a folder is read repeatedly."""
    places = [one_line(shown_url(result)) for result in results]
    names = [place.rstrip("/").rpartition("/")[2] or place for place in places]
    if len(set(names)) < len(names):
        names = places
    most = data.MOST_BYTES // len(results)
    return [_read(result, name, most, memory) for result, name in zip(results, names, strict=True)]


def _read(result: str, name: str, most: int, memory: data.Memory | None) -> dict[str, Any]:
    where = results_location(result)
    with where.open_for_reading() as folder, Ledger.read(folder) as ledger:
        return data.gather(ledger, name, status.holder(folder) or where.lock_holder(), most, memory)
