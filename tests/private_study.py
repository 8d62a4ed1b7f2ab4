"""A small study with a private search."""

import functools
from pathlib import Path

from orchestrator.execution import study_run, sweep
from orchestrator.execution.progress import View
from orchestrator.results.ledger import Ledger
from orchestrator.study.cell_id import CellId
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.reading import parse

SECRET = b"k" * 32  # draws seven runs


TEXT = """\
name: tiny
data: [{source: "synthetic-frozen:400,100,6,3", label: tiny}]
partitions: [iid]
clients: 4
methods:
  - dp-fedgd:
      coarse: {learning_rate: [0.01, 0.1, 1, 10]}
      fine: {learning_rate: [0.1, 0.5]}
epsilons: [40]
defaults: paper
privacy: {clip: 2}
rounds: {confirm: 6}
evaluate_every: 2
search: {strategies: [private], trials: 6}
resources: {gpus_per_host: 0}
"""


def study(text: str = TEXT):
    return parse(text, "tiny.yaml", Path.cwd())


CELL = "tiny / iid / DP-FedGD / eps 40"
CELL_ID = CellId("synthetic-frozen:400,100,6,3", "iid", study().methods[0].id, 40.0)


@functools.cache
def purpose(text: str = TEXT) -> str:
    """Of the first private search."""
    of = study(text)
    variant = next(each for each in of.variants if each.strategy.publishes_only_winner)
    return sweep.purpose(next(cell for cell in PreparedStudy.prepare(of).cells if cell.id == CELL_ID), variant)


def run(folder: Path, text: str = TEXT, secret: bytes = SECRET, **options) -> study_run.Finished:
    """Run the study with a known secret, which draws several runs."""
    with Ledger.write(folder) as ledger:
        ledger.add_secrets({CELL_ID: secret}, purpose(text))
    return study_run.run(study(text), text, folder, View(), backend="local", **options)


def published(folder: Path) -> dict[str, bytes]:
    files = [*sorted((folder / "tables").rglob("*")), folder / "best.yaml"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files if file.is_file()}
