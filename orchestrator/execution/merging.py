"""One result folder from several: parts of a study that were run apart, on as many clusters as one likes.

A row is a pure function of its key, so it does not matter who computed it; what two parts both have is taken once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.report.tables import write_tables
from orchestrator.report.tables.render import write_text
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import results_location
from orchestrator.study.extension import check_extension
from orchestrator.study.study import Study
from trainables.errors import UserError


def merge(parts: Sequence[Path | str], results: Path | str) -> list[str]:
    """Writes all rows of the parts into `results`, and its tables. What is there already stays."""
    where = results_location(results)
    with where.open_for_writing(), Ledger.write(where.folder) as ledger:
        for part in parts:
            with results_location(part).open_for_reading() as folder, Ledger.read(folder) as other:
                _take(other, ledger, str(part))
        found = ledger.study()
        assert found is not None
        write_text(where.folder / "study.yaml", found[1])
        return [where.address_of(path) for path in write_tables(ledger, where.folder)]


def _take(part: Ledger, into: Ledger, name: str) -> None:
    theirs, ours = part.study(), into.study()
    if theirs is None:
        raise UserError(f"result folder {name} holds no study yet")
    if ours is None:
        into.add_study(*theirs)
    else:
        for old, new in ((ours, theirs), (theirs, ours)):
            try:
                check_extension(Study.recorded(old[0], part.plugins()), Study.recorded(new[0], part.plugins()))
            except UserError as error:
                raise UserError(f"result folder {name} is of another study: {error}") from None
    into.add_plugins(part.plugins())
    into.add_data(part.fingerprints())
    into.add_settings(part.settings())
    into.add_partitions(part.partitions())
    into.add_secrets(part.secrets())
    known = into.stages()
    for (cell, strategy, stage), keys in part.stages().items():
        common = known.get((cell, strategy, stage), [])[: len(keys)]
        if common != keys[: len(common)]:
            raise UserError(f"result folder {name} has other {stage} trials of {cell!r} than those before it")
        into.add_stage(cell, strategy, stage, keys)
    into.copy_rows(part)
