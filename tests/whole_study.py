"""A study from its text to its tables, in this process."""

from pathlib import Path

from orchestrator.execution.packing import Capacity, make_packs
from orchestrator.execution.scheduler import Conductor
from orchestrator.execution.study_run import _enter_study
from orchestrator.execution.sweep import Sweep
from orchestrator.report.tables import write_tables
from orchestrator.results.ledger import Ledger
from orchestrator.study import reading
from orchestrator.study.cells import Blueprint
from trainables.federation.problem import in_process
from trainables.federation.server import run_here
from trainables.ray_actors.federation import FederationSize


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
