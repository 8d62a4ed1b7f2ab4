"""`fedsweep account`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.commands.options import Json
from orchestrator.console import echo, emit_json

if TYPE_CHECKING:
    from orchestrator.results.account import Account, RecordsAccount

ASSUMPTIONS = """\
Data sets are counted as the same records if they share a `records` name (in the data section of a study, or
`fedsweep train --records`), the name of their file, or their content. Files prepared from the same records in another
way need a common `records` name. Test rows, the number of classes and clients and the clients' sizes are assumed to be
public. A total covers only the publications listed above it."""


def account(
    places: Annotated[
        list[str],
        typer.Argument(metavar="DIR", help="Results folders or their URLs, saved models, or folders that hold either."),
    ],
    delta: Annotated[
        float | None,
        typer.Option(help="Delta of the totals.  [default: for each set of records, the smallest delta of its parts]"),
    ] = None,
    json: Json = False,
) -> None:
    """Show what these results publish, and the total epsilon.

    One total per set of records, because publications about the same records add up."""
    from orchestrator.report.tables.render import one_line
    from orchestrator.results.account import account_of

    found = account_of(places, delta)
    if json:
        emit_json(_as_json(found))
        return
    for records in found.records:
        echo(f"records    {one_line(records.name)}")
        echo(f"data       {one_line(', '.join(records.data))}")
        for (place, what), epsilon in records.by_place.items():
            echo(f"published  {one_line(place)}\n           {one_line(what)}")
            echo(f"           eps {_shown(epsilon)} on its own")
        echo(f"total      {_total(records)}\n")
    if not found.records:
        echo("Nothing here is meant for publication.\n")
    for item in found.for_analyst:
        echo(f"analyst    {one_line(item.place)}\n           {one_line(item.what)}; not for publication")
    if found.for_analyst:
        echo("")
    echo(ASSUMPTIONS)


def _total(records: RecordsAccount) -> str:
    record, user = records.total("record"), records.total("user")
    of_user = "no bound for a user" if math.isinf(user) else f"eps {_shown(user)} for one user"
    return f"eps {_shown(record)} at delta {records.delta:g} for one record; {of_user}"


def _shown(epsilon: float) -> str:
    from orchestrator.report.tables.render import rounded_up

    return "inf" if math.isinf(epsilon) else rounded_up(epsilon)


def _as_json(found: Account) -> dict[str, object]:
    return {
        "records": [
            {
                "records": records.name,
                "data": records.data,
                "delta": records.delta,
                "epsilon": {"record": records.total("record"), "user": records.total("user")},
                "published": [
                    {"place": place, "what": what, "epsilon": epsilon}
                    for (place, what), epsilon in records.by_place.items()
                ],
            }
            for records in found.records
        ],
        "analyst": [{"place": item.place, "what": item.what, "data": item.data} for item in found.for_analyst],
    }
