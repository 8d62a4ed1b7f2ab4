"""A study in a result folder: run it, take it up again, say how it stands."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator import runner
from orchestrator.cells import Blueprint
from orchestrator.cluster import connected, local_resources
from orchestrator.ledger import Ledger
from orchestrator.packing import capacity
from orchestrator.progress import View
from orchestrator.search import Sweep
from orchestrator.study import Study, check_extension
from orchestrator.tables import write_tables
from orchestrator.tables.render import write_text
from trainables.errors import UserError


@dataclass(frozen=True)
class Finished:
    """What `run` came to."""

    complete: bool
    """False after one Ctrl-C: the packs in flight were finished, the rest is for `resume`."""
    failed: int
    tables: list[Path]


def run(study: Study, source: str, folder: Path, view: View, address: str | None = None) -> Finished:
    """Run what is missing of a study and write the tables. Run again, it does nothing but write the same tables."""
    blueprint = Blueprint.draw(study)
    if address is None:
        capacity(local_resources(), study.resources, study.clients)  # what does not fit is said before Ray starts
    with _written_to(folder):
        return _run(blueprint, source, folder, view, address)


def _run(blueprint: Blueprint, source: str, folder: Path, view: View, address: str | None) -> Finished:
    study = blueprint.study
    with Ledger.write(folder) as ledger, _logging(folder):
        _enter_study(ledger, blueprint, source, folder)
        sweep = Sweep(blueprint, ledger)
        if not sweep.finished:
            view.starting(sweep)
            with connected(address):
                size = capacity(runner.node_resources(), study.resources, study.clients)
                view.started(sweep, size)
                with view:
                    runner.run(sweep, size, view.changed)
        failed = sum(1 for key in sweep.known if sweep.outcomes.get(key, ("",))[0] == "failed")
        return Finished(sweep.finished, failed, write_tables(ledger, folder))


def recorded_study(folder: Path) -> tuple[Study, str]:
    """The study that a result folder holds."""
    with Ledger.read(folder) as ledger:
        found = ledger.study()
    if found is None:
        raise UserError(f"result folder {folder} holds no study yet")
    return Study.model_validate_json(found[0]), found[1]


def rebuild_tables(folder: Path) -> list[Path]:
    with _written_to(folder), Ledger.read(folder) as ledger:
        return write_tables(ledger, folder)


def _enter_study(ledger: Ledger, blueprint: Blueprint, source: str, folder: Path) -> None:
    """Write the study into its folder, or see that it goes with the one that is there."""
    study = blueprint.study
    text = study.model_dump_json()
    before = ledger.study()
    if before is not None:
        check_extension(Study.model_validate_json(before[0]), study)
    ledger.add_data(blueprint.fingerprints)
    if before is None or before[0] != text:
        ledger.add_study(text, source)
    facts = {}
    for cell in blueprint.cells:
        setting = cell.setting
        facts[f"validation_rows:{setting.id}"] = len(blueprint.problems[setting.search.key].y_eval)
        facts[f"test_rows:{setting.id}"] = len(blueprint.problems[setting.confirm.key].y_eval)
    ledger.add_facts(facts)
    write_text(folder / "study.yaml", source)


@contextlib.contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    """A disk that is full, or refuses, is said in a sentence."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise UserError(
            f"result folder {folder} cannot be written: {error}; nothing finished is lost, and "
            f"'fedsweep resume {folder}' goes on once there is room"
        ) from error


@contextlib.contextmanager
def _logging(folder: Path) -> Iterator[None]:
    """What happened, with times, in the folder's log file."""
    logger = logging.getLogger("fedsweep")
    handler = logging.FileHandler(folder / "fedsweep.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
