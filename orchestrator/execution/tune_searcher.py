"""Any searcher of Ray Tune as the strategy `tune`: `fedsweep --import orchestrator.execution.tune_searcher`.

The searcher gets the axes as Tune's search space and is told the results of a batch in the order of its suggestions. It
runs in the driver, without a Ray cluster.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from pydantic import JsonValue

from orchestrator.search.ranges import axis_range
from orchestrator.search.strategies.ask_tell import AskTellStrategy, BatchSettings, Result
from orchestrator.search.task import SearchTask
from orchestrator.section import Section
from search_spaces import Configuration, SearchSpace
from trainables import plugins
from trainables.errors import UserError

SEED_NAMES = ("seed", "random_state_seed", "random_seed", "random_state")


class TuneSettings(BatchSettings):
    """A searcher of Ray Tune, in batches."""

    searcher: str = "optuna"
    """Ray's name (optuna, hyperopt, ax, bayesopt, hebo, ...), or MODULE.CLASS of a plug-in that is loaded."""
    options: dict[str, JsonValue] = {}
    """The searcher's own arguments."""


class Tune(AskTellStrategy):
    name = "tune"
    Settings = TuneSettings

    def searcher(self, task: SearchTask) -> _TuneSearcher:
        return _TuneSearcher(task, build(TuneSettings.of(task.settings)))

    def check_settings(self, settings: Section) -> str:
        try:
            build(TuneSettings.of(settings))
        except UserError as error:
            return str(error)
        return ""


def build(settings: TuneSettings) -> Any:
    """The searcher; raises a `UserError` if it does not exist or cannot be built."""
    searcher_class = _searcher_class(settings.searcher)
    parameters = inspect.signature(searcher_class).parameters
    seed = {name: settings.seed for name in SEED_NAMES if name in parameters and name not in settings.options}
    try:
        return searcher_class(**seed, **settings.options)
    except (AssertionError, ImportError, TypeError, ValueError) as error:  # assertion: a package is missing
        sentence = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"searcher = {settings.searcher!r} cannot be used: {sentence}") from error


def _searcher_class(name: str) -> type[Any]:
    """The class with this name, only from Ray or a plug-in: a study file must not import other code."""
    from ray.tune.search import SEARCH_ALG_IMPORT, Searcher

    module, _, title = name.rpartition(".")
    found: Any = None
    if name in SEARCH_ALG_IMPORT:
        found = SEARCH_ALG_IMPORT[name]()
    elif module in plugins.loaded():
        found = getattr(importlib.import_module(module), title, None)
    if inspect.isclass(found) and issubclass(found, Searcher):
        return found
    own = [each for each in SEARCH_ALG_IMPORT if each not in ("random", "variant_generator")]
    raise UserError(
        f"searcher = {name!r} is no searcher of Ray Tune ({', '.join(own)}) and no subclass of Searcher in a plug-in "
        "that is loaded"
    )


class _TuneSearcher:
    """Adapts a searcher of Ray Tune to `ask_tell.Searcher`."""

    def __init__(self, task: SearchTask, searcher: Any) -> None:
        self._space, self._objective, self._searcher = task.space, task.objective, searcher
        mode = "min" if task.objective.lower_is_better else "max"
        if not searcher.set_search_properties(task.objective.metric, mode, _domains(task.space)):
            name = type(searcher).__name__
            raise UserError(f"searcher {name} takes no search space: its set_search_properties returned False")
        self._rounds = task.rounds.fine
        self._asked = 0
        self._batch: list[str] = []

    def ask(self, count: int) -> list[Configuration]:
        self._batch, configurations = [], []
        for _ in range(count):
            trial = f"{self._asked:05d}"
            suggested = self._searcher.suggest(trial)
            if not isinstance(suggested, dict):  # None: no suggestion until more results; FINISHED: no more at all
                break
            self._asked += 1
            self._batch.append(trial)
            configurations.append(_configuration(self._space, suggested))
        return configurations

    def tell(self, results: Sequence[Result]) -> None:
        for trial, result in zip(self._batch, results, strict=True):
            if result.cost is None:
                self._searcher.on_trial_complete(trial, error=True)
                continue
            score = result.cost if self._objective.lower_is_better else -result.cost
            told = {self._objective.metric: score, "training_iteration": self._rounds}
            self._searcher.on_trial_complete(trial, result=told)


def _domains(space: SearchSpace) -> dict[str, Any]:
    """The axes as Tune's search space. On an axis with the scale `complement`, Tune searches 1 - value."""
    from ray import tune

    domains: dict[str, Any] = {}
    for name in space.coarse:
        kind, values, low, high, scale = axis_range(space, name)
        if kind == "choice" or low == high:
            domains[name] = tune.choice(values)
        elif kind == "integer":
            of_integers = tune.lograndint if scale == "log" else tune.randint
            domains[name] = of_integers(int(low), int(high) + 1)
        elif scale == "complement":
            domains[name] = tune.loguniform(1 - high, 1 - low)
        else:
            domains[name] = tune.loguniform(low, high) if scale == "log" else tune.uniform(low, high)
    return domains


def _configuration(space: SearchSpace, suggested: dict[str, Any]) -> Configuration:
    """The configuration that Tune suggests, with the fixed hyperparameters. Inverts the scaling of `_domains`."""
    configuration: Configuration = dict(space.fixed)
    for name in space.coarse:
        value = suggested[name]
        value = value.item() if hasattr(value, "item") else value  # searchers may return NumPy's numbers
        kind, _, low, high, scale = axis_range(space, name)
        configuration[name] = 1 - value if kind == "float" and scale == "complement" and low < high else value
    return configuration
