"""Sweeps and trainings in this process: for what a study or a command comes to, where Ray is not the question."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from orchestrator.execution import study_run, training
from orchestrator.execution.packing import Capacity, make_packs
from orchestrator.execution.scheduler import Conductor
from trainables.federation.problem import in_process
from trainables.federation.server import HostsHere, Server, run_here
from trainables.ray_actors.federation import FederationSize

LANES = 128  # of a pack, where the study does not say


def packs_here(sweep, where, view, resources, **options) -> None:
    """In place of the runner: one pack after the other, cut as the study says, written down and shown as ever."""
    lanes = LANES if resources.lanes_per_pack == "auto" else resources.lanes_per_pack
    conductor = Conductor(sweep, Capacity(FederationSize(1), 1, lanes), lambda _: None)
    while sweep.waiting:
        for pack in make_packs(list(sweep.waiting.values()), conductor.size):
            found = run_here(pack, in_process(sweep.blueprint.problems[pack[0].problem.key]))
            conductor._record([conductor._row(trial, found[trial.key]) for trial in pack])
            view.changed(conductor)
    conductor.close()


class FederationHere:
    """In place of the actors."""

    def __init__(self, size: FederationSize) -> None:
        self._server = Server(HostsHere(size.hosts))
        self.open, self.advance, self.final_weights = (
            self._server.open,
            self._server.advance,
            self._server.final_weights,
        )

    def close(self) -> None:
        pass


@contextlib.contextmanager
def without_ray(cores: int = 2) -> Iterator[None]:
    """As on a machine of so many cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_run, "_run_packs", packs_here)
        for module in (study_run, training):
            patch.setattr(module, "connected", contextlib.nullcontext)
        patch.setattr(training, "Federation", FederationHere)
        patch.setattr(training, "Shipper", lambda: SimpleNamespace(ship=in_process))
        patch.setattr(training, "ray", SimpleNamespace(cluster_resources=lambda: {"CPU": float(cores)}))
        yield
