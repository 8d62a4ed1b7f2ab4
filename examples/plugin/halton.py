"""A search strategy as a plug-in: quasi-random search that stops when batches bring no improvement.

fedsweep --import examples/plugin/halton.py run examples/plugin/halton.yaml --results results/halton
"""

from pydantic import Field
from scipy.stats import qmc

from fedsweep.plugins import Configuration, History, Proposal, SearchTask, Section, Strategy


class HaltonSettings(Section):
    """The section `search: {halton: ...}` of a study file."""

    batch: int = Field(default=4, ge=1)
    """Configurations per batch."""
    patience: int = Field(default=1, ge=1)
    """Batches without improvement before the search stops."""


class Halton(Strategy):
    """Points of a scrambled Halton sequence on the axes of the coarse grid, until the budget (`search.trials`) is used
    or the best candidate is older than the last `patience` batches."""

    name = "halton"
    stages = ("halton",)
    Settings = HaltonSettings
    extends_stages = True  # later batches depend on the results of earlier ones

    def propose(self, task: SearchTask, history: History) -> Proposal | None:
        settings = task.settings
        tried = history.candidates("halton", unique=False)
        recent = tried[-settings.batch * settings.patience :]
        no_improvement = len(tried) > len(recent) and history.best("halton") not in recent
        size = min(settings.batch, task.budget - len(tried))
        if no_improvement or size <= 0:
            return None
        # the seed fixes the sequence, so a resumed search continues it
        sequence = qmc.Halton(d=len(task.space.coarse), seed=1).fast_forward(len(tried))
        return Proposal("halton", [_configuration(task, point) for point in sequence.random(size)])

    def expected(self, task: SearchTask) -> dict[str, int]:
        return {"halton": task.budget}


def _configuration(task: SearchTask, point: list[float]) -> Configuration:
    """A point of the unit cube as hyperparameters: positive floats on a log scale between the ends of their axis, other
    axes by index."""
    configuration = dict(task.space.fixed)
    for (name, axis), u in zip(task.space.coarse.items(), point, strict=True):
        if all(isinstance(value, float) and value > 0 for value in axis):
            configuration[name] = min(axis) * (max(axis) / min(axis)) ** u
        else:
            configuration[name] = axis[int(u * len(axis))]
    return configuration
