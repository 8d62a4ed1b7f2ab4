"""A study in a results folder: run or resume it, and write its tables and figures."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.console import printable
from orchestrator.execution import backends
from orchestrator.execution.backends.base import SweepRun
from orchestrator.execution.progress import View
from orchestrator.execution.sweep import Sweep
from orchestrator.report.html.diagnosis_text import diagnoses
from orchestrator.report.tables import best, write_tables
from orchestrator.report.tables.render import write_text
from orchestrator.results.ledger import DataNames, Ledger, SettingFacts, TestClients
from orchestrator.results.locations import LEDGER, ResultsLocation, results_location
from orchestrator.results.winners import record_winners
from orchestrator.study.advice import advice
from orchestrator.study.cell_id import SettingId
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.extension import check_extension, keep_reference
from orchestrator.study.reading import with_located_data
from orchestrator.study.settings.resources import ResourceSettings
from orchestrator.study.study import Study
from trainables import files, plugins
from trainables.code_identity import package_identity
from trainables.errors import UserError
from trainables.limited_yaml import shown_yaml
from trainables.privacy.publication import ANALYST_ONLY
from trainables.urls import shown

MOST_COUNTS = 50_000  # clients times classes: a few hundred kilobytes


@dataclass(frozen=True)
class Finished:
    """The outcome of `run`."""

    complete: bool
    """False if the run was stopped: the packs in flight were finished, and `resume` runs the others."""
    failed: int
    """Number of failed trials."""
    tables: list[str]
    """Their paths or URLs."""
    page: str
    """The text of the tables' README."""
    doubts: list[str]
    """Why scores are low or uncertain, and what helps."""


def run(
    study: Study,
    source: str,
    results: Path | str,
    view: View,
    *,
    backend: str = "ray",
    address: str | None = None,
    resources: ResourceSettings | None = None,
    stop_after_s: float | None = None,
    shard: tuple[int, int] = (1, 1),
) -> Finished:
    """Run the trials of a study that have not ended, and write the tables; if all have ended, only write the tables.

    `backend`: "ray" or "local" (in this process). `address`: of a Ray cluster. `resources`: override the study's.
    `stop_after_s`: stop after this time, as after one Ctrl-C. `shard`: (k, n) runs every n-th cell from the k-th on."""
    if shard[1] > 1 and study.budgets_depend:
        why = "search.warm_start" if study.search.warm_start else "a strategy that searches all budgets together"
        raise UserError(f"shard = {shard[0]}/{shard[1]}: with {why}, cells depend on each other; run it without shards")
    deadline = math.inf if stop_after_s is None else time.monotonic() + stop_after_s
    resources = resources or study.resources
    chosen = backends.get(backend, address)
    prepared = PreparedStudy.prepare(study)
    study = prepared.study
    chosen.check(resources, prepared.most_clients)
    for note in (*prepared.data_notes(), *prepared.delta_notes()):
        view.say(f"note: {note}")
    location = results_location(results)
    with location.open_for_writing(), _write_errors(location):
        folder = location.folder
        opened = Ledger.write(folder, private=study.private, keeps_log=location.uploads_log)
        with opened as ledger, _log_to(folder, private=study.private):
            location.protect()
            location.stop_requested()  # discard requests that were meant for an earlier driver
            ledger.check_rows(location)
            ledger.correct_counts()
            changed = plugins.changed(ledger.plugin_code())
            with ledger.transaction():  # nothing is recorded if the study does not fit the folder
                _record_study(ledger, prepared, source)
                sweep = Sweep(replace(prepared, cells=prepared.cells[shard[0] - 1 :: shard[1]]), ledger)
                ledger.add_plugins(plugins.requested(), plugins.code_hashes())
            write_text(folder / "study.yaml", printable(shown_yaml(source)))
            if changed:
                names = ", ".join(changed)
                view.say(f"note: plug-in {names} has changed since this folder was run; what it computes runs again")
            _tell_changed_package(ledger, view)
            if not sweep.finished:
                for line in prepared.clients():
                    view.say(line)
                for note in advice(study):
                    view.say(f"note: {note}")
                view.starting(sweep)
                chosen.run(SweepRun(sweep, resources, location, view, deadline))
            failed = sum(1 for key in sweep.known if sweep.outcomes.get(key, ("",))[0] == "failed")
            written, found = write_tables(ledger, folder)
            record_winners(ledger, found)
            tables = [location.address_of(path) for path in written]
            page = (folder / "tables" / "README.md").read_text(encoding="utf-8")
            doubts = diagnoses(found) if sweep.finished else []
            return Finished(sweep.finished, failed, tables, page, doubts)


def recorded_study(results: Path | str) -> tuple[Study, str]:
    """The study of a results folder, and its text."""
    with results_location(results).open_for_reading() as folder, Ledger.read(folder) as ledger:
        recorded = ledger.study()
        if recorded is None:
            raise UserError(f"results folder {results} holds no study yet")
        missing = plugins.not_loaded(ledger.plugins())
        if missing:
            raise UserError(
                f"{results} was run with plug-ins that are not loaded; add{plugins.import_options(missing)}"
            )
        return with_located_data(Study.recorded(recorded[0])), recorded[1]


def rebuild_tables(results: Path | str) -> list[str]:
    location = results_location(results)
    with (
        location.open_for_reading() as folder,
        _write_errors(location, runs_trials=False),
        Ledger.read(folder) as ledger,
    ):
        if ledger.secrets():  # tables show few trials of a private search, but all of them decide the winner
            _check_trials(ledger, location)
        try:
            written, _ = write_tables(ledger, folder)
        except sqlite3.DataError:
            _check_trials(ledger, location)
            raise
        location.upload_tables()
        return [location.address_of(path) for path in written]


def _check_trials(ledger: Ledger, location: ResultsLocation) -> None:
    """Raise an error if rows are damaged or counts are wrong. It says which rows, and what helps."""
    ledger.check_rows(location)
    if not ledger.counts_are_right():
        raise UserError(
            f"the counts of the ledger in {location} are not those of its trials; "
            f"'{plugins.command('check', str(location), '--repair')}' corrects them"
        )


def draw_figures(results: Path | str) -> list[str]:
    from orchestrator.report.figures import write_figures  # imports matplotlib, which is slow

    location = results_location(results)
    with location.open_for_reading() as folder, _write_errors(location, runs_trials=False):
        figures = [location.address_of(path) for path in write_figures(folder)]
        location.upload_tables()
        return figures


def chosen_cells(results: Path | str) -> dict[str, dict[str, Any]]:
    """The chosen configuration of every cell, as in best.yaml, which is written again if the ledger is newer."""
    location = results_location(results)
    with (
        location.open_for_reading() as folder,
        _write_errors(location, runs_trials=False),
        Ledger.read(folder) as ledger,
    ):
        cells = best.chosen_cells(ledger)
        if os.access(folder, os.W_OK) and not _is_newer(folder / "best.yaml", folder / LEDGER):
            if ledger.secrets():  # best.yaml then also states the cost of publishing all winners
                write_tables(ledger, folder)
            elif _content(folder / "best.yaml") != best.content(cells):  # its header may name plug-ins of the sweep
                write_text(folder / "best.yaml", best.text(cells))
        return cells


def _content(file: Path) -> str:
    """A text file without comments; empty if it does not exist."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return "".join(line for line in lines if not line.startswith("#"))


def _is_newer(file: Path, ledger: Path) -> bool:
    """Whether the file was written after the last change of the ledger."""
    log = ledger.with_name(f"{ledger.name}-wal")
    changed = [path.stat().st_mtime_ns for path in (ledger, log) if path.exists() and path.stat().st_size]
    return file.exists() and file.stat().st_mtime_ns > max(changed)


def _record_study(ledger: Ledger, prepared: PreparedStudy, source: str) -> None:
    """Record the study in its folder, or check that it extends the one recorded there."""
    study, before = prepared.study, ledger.study()
    if before is not None:
        old = Study.recorded(before[0], ledger.plugins())
        check_extension(old, study)
        study = keep_reference(old, study)
    text = study.model_dump_json()
    ledger.add_data(prepared.fingerprints)
    if before is None or before[0] != text:
        ledger.add_study(text, source)
    ledger.add_settings(
        {
            setting.id: SettingFacts(
                prepared.validation_rows(setting), prepared.test_rows(setting), prepared.protected(setting)
            )
            for setting in prepared.settings
        }
    )
    ledger.add_partitions(_class_counts(prepared))
    ledger.add_test_clients(_test_clients(prepared))
    ledger.add_names(_names(prepared))


def _tell_changed_package(ledger: Ledger, view: View) -> None:
    """Tell which parts of the code that computes results have changed since the last run, apart from plug-ins."""
    parts = [session.environment["code parts"] for session in ledger.sessions() if "code parts" in session.environment]
    try:
        before, now = dict(json.loads(parts[-1])) if parts else {}, package_identity()
    except (TypeError, ValueError, RecursionError):
        raise UserError("the ledger is damaged: the 'code parts' of a session are not a JSON object") from None
    if changed := [name for name, value in now.items() if before.get(name, value) != value]:
        view.say(f"note: {', '.join(changed)} changed since the last run in this folder; recorded trials are kept")


def _test_clients(prepared: PreparedStudy) -> dict[str, TestClients]:
    """The clients of the test rows, by data set. Empty for a private search, which publishes nothing per client."""
    found: dict[str, TestClients] = {}
    for setting in () if prepared.study.private else prepared.settings:
        problem = prepared.problems[next(iter(setting.confirm.values())).key]
        if problem.clients_eval is not None:
            found[setting.id.data] = TestClients(problem.clients_eval.tolist(), problem.data.client_names)
    return found


def _names(prepared: PreparedStudy) -> dict[str, DataNames]:
    """The names of classes and clients, by data set, where it gives any. Empty for a private search."""
    found: dict[str, DataNames] = {}
    for setting in () if prepared.study.private else prepared.settings:
        data = prepared.problems[next(iter(setting.confirm.values())).key].data
        if data.class_names or data.client_names:
            found[setting.id.data] = DataNames(data.class_names, data.client_names)
    return found


def _class_counts(prepared: PreparedStudy) -> dict[tuple[SettingId, int], list[list[int]]]:
    """The rows of each class at each client, for every partition of a confirm run; only the number of rows per client
    where labels are not classes or the table would be large."""
    counts: dict[tuple[SettingId, int], list[list[int]]] = {}
    for setting in prepared.settings:
        for spec in setting.confirm.values():
            name, problem = (setting.id, spec.partition.seed), prepared.problems[spec.key]
            if name in counts:
                continue
            sizes = problem.partition.sizes
            if problem.data.task == "poisson" or len(sizes) * problem.data.classes > MOST_COUNTS:
                counts[name] = [[int(size)] for size in sizes]
            else:
                counts[name] = problem.partition.counts(problem.data).tolist()
    return counts


@contextlib.contextmanager
def _write_errors(location: ResultsLocation, *, runs_trials: bool = True) -> Iterator[None]:
    """Turn errors of writing, such as a full or read-only disk, into a `UserError` that ends with what helps."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        when = "there is room" if _says_full(error) else "it can be written"
        advice = f"nothing was recorded yet: run the study again once {when}"
        if not runs_trials:
            advice = f"run the same command again once {when}"
        elif _holds_study(location):
            command = plugins.command("resume", str(location))
            advice = f"no finished trial is lost; once {when}, this command continues: {command}"
        raise UserError(f"results folder {location} cannot be written: {error}; {advice}") from error


def _says_full(error: sqlite3.Error | OSError) -> bool:
    """Whether the disk is full. Only the error code counts, because a message may quote a path."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def _holds_study(location: ResultsLocation) -> bool:
    try:
        with Ledger.read(location.folder) as ledger:
            return ledger.study() is not None
    except (UserError, sqlite3.Error, OSError):
        return False


class _WithoutCredentials(logging.Formatter):
    """Removes credentials from the URLs in messages."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


@contextlib.contextmanager
def _log_to(folder: Path, *, private: bool) -> Iterator[None]:
    """While the block runs, append log messages to fedsweep.log in this folder. `private`: only its owner can read
    it."""
    logger = logging.getLogger("fedsweep")
    mode = files.PRIVATE if private else files.PUBLIC
    descriptor = files.open_in_place(folder / "fedsweep.log", os.O_WRONLY | os.O_APPEND, mode)
    file = os.fdopen(descriptor, "a", encoding="utf-8")
    handler = logging.StreamHandler(file)
    handler.setFormatter(_WithoutCredentials("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.info(ANALYST_ONLY)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        file.close()
