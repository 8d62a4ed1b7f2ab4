"""A search strategy as a plug-in: quasi-random search that stops when a batch brings no improvement.

fedsweep --import examples/plugin/halton.py run examples/plugin/halton.yaml --results results/halton
"""

from pydantic import Field
from scipy.stats import qmc

import search_spaces
from fedsweep.plugins import History, Proposal, SearchTask, Section, Strategy


class HaltonSettings(Section):
    """The section `search: {halton: ...}` of a study file."""

    batch: int = Field(default=4, ge=1)
    """Configurations per batch."""
    patience: int = Field(default=1, ge=1)
    """Batches without improvement before the search stops."""


class Halton(Strategy):
    """Points of a scrambled Halton sequence on the axes of the coarse grid, until `patience` batches in a row have not
    found a better candidate, or the budget (`search.trials`) is used."""

    name = "halton"
    stages = ("halton",)
    Settings = HaltonSettings
    extends_stages = True  # later batches depend on the results of earlier ones

    def propose(self, task: SearchTask, history: History) -> Proposal | None:
        batch, patience = task.settings.batch, task.settings.patience
        tried = history.candidates("halton", unique=False)
        best = history.best("halton")
        if best is not None and len(tried) - batch * patience > max(i for i, c in enumerate(tried) if c == best):
            return None
        size = min(batch, task.budget - len(tried))
        if size <= 0:
            return None
        # the sequence is a function of its seed: a resumed search skips what it has proposed
        sequence = qmc.Halton(d=len(task.space.coarse), seed=1).fast_forward(len(tried))
        return Proposal("halton", [_configuration(task, point) for point in sequence.random(size)])

    def expected(self, task: SearchTask) -> dict[str, int]:
        return {"halton": task.budget}


def _configuration(task: SearchTask, point) -> dict:
    """A point of the unit cube as hyperparameters: numbers between the ends of their axis on a log scale, words by
    index."""
    configuration = dict(task.space.fixed)
    for (name, axis), u in zip(task.space.coarse.items(), point, strict=True):
        if search_spaces.is_numeric(axis) and min(axis) > 0:
            configuration[name] = float(min(axis) * (max(axis) / min(axis)) ** u)
        else:
            configuration[name] = axis[int(u * len(axis))]
    return configuration
