"""Merges results folders: parts of a study that were run separately, for example on several clusters.

On one kind of device, a trial's result is a pure function of its key. On another kind of device, only its last bits may
differ. So if several parts have computed a trial, any of their results can be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.console import printable
from orchestrator.report.tables import write_tables
from orchestrator.report.tables.render import write_text
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import results_location
from orchestrator.results.winners import record_winners
from orchestrator.study.extension import check_extension
from orchestrator.study.study import Study
from trainables.errors import UserError
from trainables.limited_yaml import shown_yaml

PAGE_CACHE_MB = 300  # keys arrive in random order: the indexes of a million trials should fit


def merge(parts: Sequence[Path | str], results: Path | str) -> list[str]:
    """Add the rows of all parts to the results folder `results`, and write its tables. Returns the paths or URLs of the
    tables."""
    location = results_location(results)
    with location.open_for_writing(), Ledger.write(location.folder, page_cache_mb=PAGE_CACHE_MB) as ledger:
        with ledger.transaction():  # all parts or none
            for part in parts:
                with results_location(part).open_for_reading() as folder, Ledger.read(folder) as other:
                    _copy(other, ledger, str(part))
            ledger.recount()
        study = ledger.study()
        assert study is not None
        write_text(location.folder / "study.yaml", printable(shown_yaml(study[1])))
        written, found = write_tables(ledger, location.folder)
        record_winners(ledger, found)
        return [location.address_of(path) for path in written]


def _copy(part: Ledger, into: Ledger, name: str) -> None:
    theirs, ours = part.study(), into.study()
    if theirs is None:
        raise UserError(f"results folder {name} holds no study yet")
    if ours is None:
        into.add_study(*theirs)
    else:
        for old, new in ((ours, theirs), (theirs, ours)):
            try:
                check_extension(Study.recorded(old[0], part.plugins()), Study.recorded(new[0], part.plugins()))
            except UserError as error:
                raise UserError(f"results folder {name} is of another study: {error}") from None
    into.add_plugins(part.plugins(), {**part.plugin_code(), **into.plugin_code()})
    into.add_data(part.fingerprints())
    into.add_settings(part.settings())
    into.add_partitions(part.partitions())
    into.add_test_clients(part.test_clients())
    into.add_names(part.names())
    stages = part.stages()
    searched = {cell for cell, _, _ in stages}
    secrets, taken = into.secrets(), {cell: secret for cell, secret in part.secrets().items() if cell in searched}
    for cell, secret in taken.items():
        if secrets.get(cell, secret) != secret:
            raise UserError(f"results folder {name} has another private search of {cell} than the parts before it")
    into.add_secrets(taken, None)
    for (cell, variant, stage), keys in stages.items():
        known = into.stage(cell, variant, stage)
        if known[: len(keys)] != keys[: len(known)]:
            raise UserError(f"results folder {name} has other {stage} trials of {cell!r} than the parts before it")
        into.copy_stage(cell, variant, stage, keys, len(known))
    into.copy_rows(part)
