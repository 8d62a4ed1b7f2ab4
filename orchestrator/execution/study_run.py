"""A study in a result folder: run it, take it up again, say how it stands."""

from __future__ import annotations

import contextlib
import logging
import math
import platform
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.execution.backends import ray as ray_backend
from orchestrator.execution.cluster import nodes
from orchestrator.execution.cluster.connect import connected, local_resources
from orchestrator.execution.cluster.nodes import STRATEGY, asked_for
from orchestrator.execution.cluster.ray_internals import session_folder
from orchestrator.execution.host_memory import within_memory
from orchestrator.execution.packing import Capacity, capacity, smallest
from orchestrator.execution.progress import View
from orchestrator.execution.scheduler import Conductor
from orchestrator.execution.sweep import Sweep
from orchestrator.report.tables import write_tables
from orchestrator.report.tables.best import read_best
from orchestrator.report.tables.render import write_text
from orchestrator.results.ledger import Ledger, SettingFacts
from orchestrator.results.locations import SCRATCH, ResultsLocation, results_location
from orchestrator.study.advice import advice
from orchestrator.study.cell_id import SettingId
from orchestrator.study.cells import Blueprint
from orchestrator.study.extension import check_extension, keep_reference
from orchestrator.study.reading import found_again
from orchestrator.study.settings.resources import ResourceSettings
from orchestrator.study.study import Study
from trainables import plugins
from trainables.errors import UserError
from trainables.models import kernels

MOST_COUNTS = 50_000  # clients times classes, a few hundred kilobytes
WAIT_FOR_CLUSTER_S = 900.0  # how long a cluster may take to start the first node that is large enough
LOOK_EVERY_S = 2.0
SAY_WAITING_EVERY_S = 30.0


@dataclass(frozen=True)
class Finished:
    """What `run` came to."""

    complete: bool
    """False after one Ctrl-C: the packs in flight were finished, the rest is for `resume`."""
    failed: int
    tables: list[str]
    """Where they are."""
    page: str
    """The one to begin with."""


def run(
    study: Study,
    source: str,
    results: Path | str,
    view: View,
    address: str | None = None,
    resources: ResourceSettings | None = None,
    stop_after_s: float | None = None,
    shard: tuple[int, int] = (1, 1),
) -> Finished:
    """Run what is missing of a study and write the tables. Run again, it does nothing but write the same tables.
    `resources`: for this run, instead of the study's own. `stop_after_s`: then it ends as after one Ctrl-C.
    `shard`: (k, n) for every n-th cell, from the k-th on."""
    if shard[1] > 1 and study.search.warm_start:
        raise UserError(
            f"shard = {shard[0]}/{shard[1]}: with search.warm_start cells need the budgets beside them; run it whole"
        )
    end = math.inf if stop_after_s is None else time.monotonic() + stop_after_s
    resources = resources or study.resources
    blueprint = Blueprint.draw(study)
    if address is None:
        capacity(local_resources(), resources, blueprint.most_clients)  # what does not fit is said before Ray starts
    for note in blueprint.delta_notes():
        view.say(f"note: {note}")
    where = results_location(results)
    with where.open_for_writing(), _written_to(where):
        return _run(blueprint, source, where, view, address, resources, end, shard)


def _run(
    blueprint: Blueprint,
    source: str,
    where: ResultsLocation,
    view: View,
    address: str | None,
    resources: ResourceSettings,
    end: float,
    shard: tuple[int, int],
) -> Finished:
    folder = where.folder
    with Ledger.write(folder) as ledger, _logging(folder):
        _enter_study(ledger, blueprint, source, folder)
        sweep = Sweep(replace(blueprint, cells=blueprint.cells[shard[0] - 1 :: shard[1]]), ledger)
        if not sweep.finished:
            for sentence in advice(blueprint.study):
                view.say(f"note: {sentence}")
            view.starting(sweep)
            with connected(address):
                _run_packs(sweep, where, view, resources, elastic=address is not None, end=end)
        failed = sum(1 for key in sweep.known if sweep.outcomes.get(key, ("",))[0] == "failed")
        written = [where.address_of(path) for path in write_tables(ledger, folder)]
        return Finished(sweep.finished, failed, written, (folder / "tables" / "README.md").read_text(encoding="utf-8"))


def _run_packs(
    sweep: Sweep, where: ResultsLocation, view: View, resources: ResourceSettings, *, elastic: bool, end: float
) -> None:
    """To the end, or until stopped. Where nodes have gone and federations no longer fit, with smaller ones.
    `elastic`: on a cluster whose nodes may still be on their way."""

    def why_stop() -> str:
        if time.monotonic() > end:
            return "the time is over"
        return "cancelled" if where.stop_requested() else ""

    def changed(conductor: Conductor) -> None:
        where.notify_recorded(len(conductor.sweep.outcomes))
        view.changed(conductor)

    where.stop_requested()  # a wish of yesterday is not meant
    while True:
        size = _size(resources, sweep.blueprint.most_clients, view, elastic)
        size = within_memory(size, resources, sweep.blueprint.most_weights, nodes.node_resources())
        view.started(sweep, size)
        sweep.ledger.begin_session(_surroundings(size))
        with contextlib.suppress(ray_backend.StartAgainError), view:
            scratch = where.folder / SCRATCH
            ray_backend.run(
                sweep, size, changed, where.checkpoints, scratch, say=view.say, elastic=elastic, why_stop=why_stop
            )
            return


def _surroundings(size: Capacity) -> dict[str, str]:
    """What this run computes on. Kinds of device differ in the last bits: so it can be told who computed what."""
    device = size.size.device
    return {
        "device": f"{size.size.accelerator} {device}".strip(),
        "kernel": kernels.chosen(device),
        "machine": platform.machine(),
        "nodes": str(len(nodes.node_resources())),
        "logs": str(Path(session_folder()) / "logs"),
    }


def _size(resources: ResourceSettings, clients: int, view: View, elastic: bool) -> Capacity:
    """By what is free on the nodes; where nothing is, by what they have: then slots wait until others leave."""
    try:
        whole = capacity(nodes.node_resources(), resources, clients)
    except UserError as error:
        if not elastic:
            raise
        whole = _waited_for(error, resources, clients, view)
    try:
        free = capacity(nodes.free_resources(), resources, clients)
    except UserError:
        return replace(whole, federations=1)
    # GPUs that others hold are waited for: results on a CPU have other last bits, and take longer
    return free if free.size.device == whole.size.device else replace(whole, federations=1)


def _waited_for(missing: UserError, resources: ResourceSettings, clients: int, view: View) -> Capacity:
    """A cluster without a node that is large enough is asked for one, and given time."""
    began = time.monotonic()
    said = -math.inf
    with asked_for(smallest(resources).bundles, STRATEGY[resources.placement]):
        while True:
            if time.monotonic() - said > SAY_WAITING_EVERY_S:
                said = time.monotonic()
                view.say(f"{missing}; waiting for nodes, for {WAIT_FOR_CLUSTER_S / 60:.0f} min at most")
            time.sleep(LOOK_EVERY_S)
            try:
                return capacity(nodes.node_resources(), resources, clients)
            except UserError:
                if time.monotonic() - began > WAIT_FOR_CLUSTER_S:
                    raise


def recorded_study(results: Path | str) -> tuple[Study, str]:
    """The study that a result folder holds."""
    with results_location(results).open_for_reading() as folder, Ledger.read(folder) as ledger:
        found = ledger.study()
        if found is None:
            raise UserError(f"result folder {results} holds no study yet")
        missing = plugins.not_loaded(ledger.plugins())
        if missing:
            raise UserError(
                f"{results} was run with plug-ins that are not loaded; say{plugins.import_options(missing)}"
            )
        return found_again(Study.recorded(found[0])), found[1]


def rebuild_tables(results: Path | str) -> list[str]:
    where = results_location(results)
    with where.open_for_reading() as folder, _written_to(where), Ledger.read(folder) as ledger:
        written = [where.address_of(path) for path in write_tables(ledger, folder)]
        where.upload_tables()
        return written


def draw_figures(results: Path | str) -> list[str]:
    from orchestrator.report.figures import write_figures  # matplotlib takes its time to import

    where = results_location(results)
    with where.open_for_reading() as folder, _written_to(where):
        written = [where.address_of(path) for path in write_figures(folder)]
        where.upload_tables()
        return written


def chosen_cells(results: Path | str) -> dict[str, dict[str, Any]]:
    """The chosen configuration of every cell, as best.yaml has it."""
    where = results_location(results)
    with where.open_for_reading() as folder, _written_to(where), Ledger.read(folder) as ledger:
        write_tables(ledger, folder)
        return read_best(folder / "best.yaml")


def _enter_study(ledger: Ledger, blueprint: Blueprint, source: str, folder: Path) -> None:
    """Write the study into its folder, or see that it goes with the one that is there."""
    study, before = blueprint.study, ledger.study()
    if before is not None:
        old = Study.recorded(before[0], ledger.plugins())
        check_extension(old, study)
        study = keep_reference(old, study)
    text = study.model_dump_json()
    ledger.add_data(blueprint.fingerprints)
    ledger.add_plugins(plugins.requested())
    if before is None or before[0] != text:
        ledger.add_study(text, source)
    ledger.add_settings(
        {
            setting.id: SettingFacts(
                blueprint.validation_rows(setting), blueprint.test_rows(setting), blueprint.protected(setting)
            )
            for setting in blueprint.settings
        }
    )
    ledger.add_partitions(_who_holds_what(blueprint))
    write_text(folder / "study.yaml", source)


def _who_holds_what(blueprint: Blueprint) -> dict[tuple[SettingId, int], list[list[int]]]:
    """Of every partition that a confirm run trains on, the rows of each class at each client; where that is too much to
    keep, or labels are no classes, each client's rows in one number."""
    found: dict[tuple[SettingId, int], list[list[int]]] = {}
    for setting in blueprint.settings:
        for spec in setting.confirm.values():
            name, problem = (setting.id, spec.partition.seed), blueprint.problems[spec.key]
            if name in found:
                continue
            sizes = problem.partition.sizes
            if problem.data.task == "poisson" or len(sizes) * problem.data.classes > MOST_COUNTS:
                found[name] = [[int(size)] for size in sizes]
            else:
                found[name] = problem.partition.counts(problem.data).tolist()
    return found


@contextlib.contextmanager
def _written_to(where: ResultsLocation) -> Iterator[None]:
    """A disk that is full, or refuses, is said in a sentence."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise UserError(
            f"result folder {where} cannot be written: {error}; nothing finished is lost, and "
            f"'fedsweep resume {where}{plugins.import_options()}' goes on once there is room"
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
