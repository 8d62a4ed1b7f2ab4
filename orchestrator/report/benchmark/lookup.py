"""Lookups of training runs in an exported table, directly or as the objective of a tuner."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow.parquet

from orchestrator.report.benchmark.columns import COLUMNS, HYPER
from trainables.data.importing.reading import read_parquet
from trainables.errors import UserError, one_of
from trainables.files import open_plain

if TYPE_CHECKING:
    import optuna

METRICS = ("accuracy", "loss")

MOST_VALUES = 10**9
"""Limit on rows times columns: a small Parquet file can expand to any number of equal rows."""


@dataclass(frozen=True)
class Task:
    """A problem for hyperparameter tuners: one method at one budget in one setting."""

    trials: pd.DataFrame
    """One row per trial and evaluated round. The column `configuration` has the clip and the planned rounds, too."""
    metric: str = "accuracy"
    """The metric of `curve` and of the objectives: accuracy or loss."""
    seeds: tuple[int, ...] | None = None
    """The seeds to average over; None: all."""

    @classmethod
    def load(
        cls,
        file: Path | str,
        method: str,
        epsilon: float,
        *,
        setting: str | None = None,
        split: str = "validation",
        metric: str = "accuracy",
        seeds: Sequence[int] | None = None,
    ) -> Task:
        """A task from a benchmark file. `method`: its name, or its label if it has variants."""
        one_of(METRICS, metric=metric)
        found = read(file)
        for name, wanted in (("split", split), ("epsilon", epsilon), ("setting", setting)):
            if wanted is not None:
                found = _only(found, name, wanted)
        named = found[(found["label"] == method) | (found["method"] == method)]
        if named.empty:
            raise UserError(f"method = {method!r} is not in the table; it has: {', '.join(_values(found['label']))}")
        for name in ("label", "setting"):
            if len(_values(named[name])) > 1:
                raise UserError(f"the table has several {name}s: {', '.join(_values(named[name]))}; name one")
        return cls(_with_clip_and_rounds(named), metric, None if seeds is None else tuple(seeds))

    @cached_property
    def configurations(self) -> list[dict[str, Any]]:
        """All configurations, in the order of the table."""
        return [json.loads(text) for text in dict.fromkeys(self.trials["configuration"])]

    @cached_property
    def axes(self) -> dict[str, list[Any]]:
        """The values of every hyperparameter that has more than one."""
        names = list(dict.fromkeys(name for found in self.configurations for name in found))
        values = {name: list(dict.fromkeys(found.get(name) for found in self.configurations)) for name in names}
        return {name: _sorted(tried) for name, tried in values.items() if len(tried) > 1}

    @cached_property
    def _curves(self) -> dict[tuple[Any, ...], dict[int, float]]:
        chosen = self.trials if self.seeds is None else self.trials[self.trials["seed"].isin(self.seeds)]
        means = chosen.groupby(["configuration", "round"], sort=True)[self.metric].mean()
        lost = chosen[chosen["state"] != "done"].groupby("configuration")["rounds"].min().to_dict()
        found: dict[tuple[Any, ...], dict[int, float]] = {}
        for text, t, value in means.reset_index().itertuples(index=False):
            if t < lost.get(text, math.inf):
                found.setdefault(self._point(json.loads(str(text))), {})[int(t)] = float(value)
        for text, t in lost.items():
            found.setdefault(self._point(json.loads(str(text))), {})[int(t)] = math.nan
        return found

    @cached_property
    def _stopped_early(self) -> set[tuple[Any, ...]]:
        """Configurations all of whose finished trials were stopped early by successive halving."""
        done = self.trials[self.trials["state"] == "done"]
        stopped = (done["rounds"] < done["of_rounds"]).groupby(done["configuration"]).all()
        return {self._point(json.loads(str(text))) for text in stopped.index[stopped]}

    def was_cut(self, configuration: Mapping[str, Any]) -> bool:
        """Whether successive halving stopped all finished trials of a configuration before the last round."""
        return self._point(configuration) in self._stopped_early

    def _point(self, configuration: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(configuration.get(name) for name in self.axes)

    def curve(self, configuration: Mapping[str, Any]) -> dict[int, float] | None:
        """The metric by round, averaged over seeds with a value. It ends with nan if a seed diverged or failed.
        None for a combination that was never run. Hyperparameters that are not axes are ignored; a name that is not in
        the table is an error."""
        known = {*self.axes, "clip", "rounds"}
        unknown = [name for name in configuration if name not in known and f"{HYPER}{name}" not in self.trials]
        if unknown:
            raise UserError(f"hyperparameter {unknown[0]!r} is not in the table; it has: {', '.join(self.axes)}")
        return self._curves.get(self._point(configuration))

    # ---- tuners

    def optuna_objective(self, rounds: int | None = None) -> Callable[[optuna.Trial], float]:
        """An objective for Optuna's `study.optimize`. Axes are categorical, and rounds are reported as steps, for
        pruners. A combination is pruned if it was never run, if a seed diverged or failed, or if halving stopped it.
        `rounds`: the round to stop after; default: the last."""

        def objective(trial: optuna.Trial) -> float:
            import optuna

            chosen = {name: trial.suggest_categorical(name, values) for name, values in self.axes.items()}
            curve = self.curve(chosen)
            if curve is None:
                raise optuna.TrialPruned("this combination was never run")
            last = float("nan")
            for t, value in curve.items():
                if rounds is not None and t > rounds:
                    break
                last = value
                trial.report(value, t)
                if trial.should_prune():
                    raise optuna.TrialPruned
            if last != last:
                raise optuna.TrialPruned("a seed diverged or failed")
            if self.was_cut(chosen) and (rounds is None or rounds > max(curve)):
                raise optuna.TrialPruned("successive halving stopped it")
            return last

        return objective

    def tune_trainable(self) -> Callable[[dict[str, Any]], None]:
        """A trainable for `tune.Tuner` that reports the metric by round. Use it with
        `param_space={"configuration": tune.grid_search(task.configurations)}`, or with `tune.choice`."""
        curves = {json.dumps(each, sort_keys=True): self.curve(each) for each in self.configurations}
        metric = self.metric

        def trainable(config: dict[str, Any]) -> None:
            from ray import tune

            for t, value in (curves[json.dumps(config["configuration"], sort_keys=True)] or {}).items():
                tune.report({metric: value, "round": t})

        return trainable


def _with_clip_and_rounds(trials: pd.DataFrame) -> pd.DataFrame:
    """Runs with another clip, or with noise for another number of rounds, are runs of another configuration."""
    parts = ["configuration", "clip", "of_rounds"]
    texts = {
        (text, clip, rounds): json.dumps({**json.loads(text), "clip": clip, "rounds": rounds}, sort_keys=True)
        for text, clip, rounds in trials[parts].drop_duplicates().itertuples(index=False, name=None)
    }
    return trials.assign(configuration=[texts[key] for key in trials[parts].itertuples(index=False, name=None)])


def read(file: Path | str) -> pd.DataFrame:
    try:
        with open_plain(Path(file), follow=True) as content:
            about = pyarrow.parquet.read_metadata(content)
            if about.num_rows * about.num_columns > MOST_VALUES:
                raise UserError(f"{file} holds more than {MOST_VALUES} values")
            found = read_parquet(str(file), content)
    except (OSError, ValueError, MemoryError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as Parquet: {error}".replace("\n", " ")) from None
    for name, (kind, _) in COLUMNS.items():
        if found.column_names.count(name) != 1:
            raise UserError(f"{file} is not a fedsweep export: it has no column {name!r}")
        if str(found[name].type) != kind or (kind != "double" and found[name].null_count):
            raise UserError(f"{file} is not a fedsweep export: column {name!r} does not hold values of type {kind}")
    for text in found["configuration"].unique().to_pylist():
        if not _is_configuration(text):
            raise UserError(f"{file} is not a fedsweep export: {text!r:.80} is not a configuration")
    return found.to_pandas(ignore_metadata=True)


def _is_configuration(text: str) -> bool:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and all(isinstance(each, str | int | float | None) for each in values.values())


def _only(found: pd.DataFrame, name: str, wanted: Any) -> pd.DataFrame:
    kept = found[found[name] == wanted]
    if kept.empty:
        raise UserError(f"{name} = {wanted!r} is not in the table; it has: {', '.join(_values(found[name]))}")
    return kept


def _values(column: pd.Series) -> list[str]:
    return [f"{value:g}" if isinstance(value, float) else str(value) for value in dict.fromkeys(column)]


def _sorted(values: list[Any]) -> list[Any]:
    return sorted(values, key=lambda value: (str(type(value)), value))
