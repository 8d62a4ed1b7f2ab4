"""A study from its text to its tables, in this process."""

from pathlib import Path

from orchestrator.report.tables import write_tables
from orchestrator.results.ledger import Ledger
from orchestrator.running.conductor import Conductor
from orchestrator.running.packing import Capacity, make_packs
from orchestrator.running.sweeping import _enter_study
from orchestrator.search.sweep import Sweep
from orchestrator.study import reading
from orchestrator.study.cells import Blueprint
from trainables.federation import FederationSize
from trainables.problem import in_process
from trainables.server import run_here


def run(text: str, folder: Path) -> None:
    """As the runner would record it."""
    blueprint = Blueprint.draw(reading.parse(text, "study.yaml", Path()))
    size = Capacity(FederationSize(1), 1, 128)
    with Ledger.write(folder) as ledger:
        _enter_study(ledger, blueprint, text, folder)
        sweep = Sweep(blueprint, ledger)
        conductor = Conductor(sweep, size, lambda _: None)
        while not sweep.finished:
            for pack in make_packs(list(sweep.waiting.values()), size):
                lanes = run_here(pack, in_process(blueprint.problems[pack[0].problem.key]))
                conductor._record([conductor._row(trial, lanes[trial.key]) for trial in pack])
        write_tables(ledger, folder)
