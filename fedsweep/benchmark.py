"""Tuning problems for tests of tuners: `Task` looks runs up in an exported table, `LiveTask` trains them.

Stability: provisional.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from fedsweep.studies import StudyLike, read_study
from orchestrator.bench.regret import FIRST_EVALUATION_SEED, Runner
from orchestrator.report.benchmark.lookup import Task
from orchestrator.search.plugin_checks import check_configuration
from orchestrator.search.ranges import suggest
from orchestrator.study.cells import Cell, PreparedStudy
from search_spaces import SearchSpace
from trainables.errors import UserError
from trainables.spec import HyperValue

if TYPE_CHECKING:
    import optuna

__all__ = ["LiveTask", "Task"]

SEEDS = tuple(FIRST_EVALUATION_SEED + k for k in range(20))
"""Seeds that no search uses, unless a study names them."""


class LiveTask:
    """A problem for hyperparameter tuners: one method at one budget in one setting. The value of a configuration is its
    mean accuracy over many seeds, computed on request. Trials run in packs in the calling process; a `LiveTask`
    runs each trial once."""

    def __init__(
        self,
        study: StudyLike,
        *,
        method: str | None = None,
        epsilon: float | None = None,
        setting: str | None = None,
        split: Literal["validation", "test"] = "test",
        seeds: Sequence[int] = SEEDS,
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        """`method`, `epsilon`, `setting`: the cell of the study, as in its tables; not needed if there is only one.
        `split`: the rows that accuracies are measured on. `test` trains on all train rows, `validation` on those
        that a search trains on; both for as many rounds as the confirm stage. `seeds`: the seeds to average over."""
        if not seeds:
            raise UserError("seeds = (): a value is a mean over at least one seed")
        if split not in ("validation", "test"):
            raise UserError(f"split = {split!r} is unknown; choose one of: validation, test")
        given = read_study(study)[0]
        averaged = given.seeds.model_copy(update={"search": list(seeds), "contest": [], "confirm": list(seeds)})
        self._prepared = PreparedStudy.prepare(given.model_copy(update={"seeds": averaged}))
        self.cell = _only_cell(self._prepared.cells, method, epsilon, setting)
        self.seeds, self.split = tuple(seeds), split
        self._runner = Runner(device)

    @property
    def space(self) -> SearchSpace:
        """The axes that the study searches. A configuration may also have other values."""
        return self.cell.space

    def values(self, configurations: Sequence[Mapping[str, HyperValue]]) -> list[float]:
        """Mean accuracy of every configuration, in percent. A trial that diverged counts as random guessing."""
        chosen = [dict(configuration) for configuration in configurations]
        for configuration in chosen:
            check_configuration(configuration, self.space)
        scores = self._runner.evaluate(self.cell, self._prepared.problems, chosen, confirm=self.split == "test")
        return [fmean(by_seed) for by_seed in scores]

    def value(self, configuration: Mapping[str, HyperValue]) -> float:
        """Mean accuracy of a configuration, in percent."""
        return self.values([configuration])[0]

    @property
    def trial_count(self) -> int:
        """Number of trials computed so far."""
        return len(self._runner.outcomes)

    def optuna_objective(self) -> Callable[[optuna.Trial], float]:
        """An objective for Optuna's `study.optimize`: a numeric axis is sampled between its lowest and highest
        value, on its scale, and any other from its values."""
        return lambda trial: self.value(suggest(self.space, trial))

    def tune_trainable(self) -> Callable[[dict[str, Any]], None]:
        """A trainable for `tune.Tuner`. `config` is the configuration; values that the study fixes may be left out."""

        def trainable(config: dict[str, Any]) -> None:
            from ray import tune

            tune.report({"accuracy": self.value({**self.space.fixed, **config})})

        return trainable


def _only_cell(cells: Sequence[Cell], method: str | None, epsilon: float | None, setting: str | None) -> Cell:
    found = [
        cell
        for cell in cells
        if method in (None, cell.method.name, cell.method.shown)
        and epsilon in (None, cell.epsilon)
        and setting in (None, cell.setting.name)
    ]
    if len(found) != 1:
        fitting = found or cells
        named = {
            "method": [repr(cell.method.shown) for cell in fitting],
            "epsilon": [f"{cell.epsilon:g}" for cell in fitting],
            "setting": [repr(cell.setting.name) for cell in fitting],
        }
        choices = "; ".join(f"{name} = {' or '.join(dict.fromkeys(own))}" for name, own in named.items())
        what = f"matches {len(found)} cells" if found else "matches no cell"
        selection = f"method = {method!r}, epsilon = {epsilon}, setting = {setting!r}"
        raise UserError(f"{selection} {what} of the study; choose {choices}")
    return found[0]
