"""What a plug-in needs: the base of a method, and decorators for heads, data sources and partitions.

A program loads one with `use`, as the commands do with --import.

A study names them by the word given here: `model: wide:64`, `source: sensors:2024`, `partitions: [by-size:2]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from trainables import models
from trainables.data import features
from trainables.data import partition as partitions
from trainables.data.features import FeatureSet, Rows
from trainables.data.partition import PartitionSpec
from trainables.errors import UserError
from trainables.methods.base import (
    ClientProgram,
    ClientRound,
    Hyperparameter,
    Hypers,
    Method,
    Run,
    State,
    learning_rate,
)
from trainables.models import Model
from trainables.plugins import use
from trainables.privacy.plan import Event

__all__ = [
    "ClientProgram",
    "ClientRound",
    "Event",
    "FeatureSet",
    "Hyperparameter",
    "Hypers",
    "Method",
    "Model",
    "PartitionSpec",
    "Rows",
    "Run",
    "State",
    "UserError",
    "data_source",
    "head",
    "learning_rate",
    "partition",
    "use",
]

Head = Callable[[str, int, int], Model]
Source = Callable[[str], Mapping[str, NDArray[Any]]]
Partitioner = Callable[[FeatureSet, PartitionSpec], list[Rows]]


def head(name: str) -> Callable[[Head], Head]:
    """Adds a model: called with what stands behind the colon, the number of features and of classes."""
    return _adder(name, models.HEADS, {form.partition(":")[0] for form in models.FORMS}, "head")


def data_source(name: str) -> Callable[[Source], Source]:
    """Adds a data source: called with what stands behind the colon, it returns the arrays of a feature file."""
    return _adder(name, features.PLUGIN_SOURCES, {"synthetic", "synthetic-frozen", "simulated"}, "data source")


def partition(name: str) -> Callable[[Partitioner], Partitioner]:
    """Adds a partition: called with the data and the settings (parameter, clients, seed), it returns the train rows of
    every client. Every row goes to exactly one of them."""
    return _adder(
        name, partitions.PLUGIN_PARTITIONS, {form.partition(":")[0] for form in partitions.FORMS}, "partition"
    )


def _adder(name: str, known: dict[str, Any], taken: set[str], what: str) -> Callable[[Any], Any]:
    if not name or ":" in name or name in taken:
        raise UserError(f"a {what} cannot be called {name!r}: the name is taken, empty or has a colon")

    def add(made: Any) -> Any:
        before = known.get(name)
        if before is not None and before.__module__ != made.__module__:
            raise UserError(f"a {what} {name!r} is there already, in {before.__module__}")
        known[name] = made
        return made

    return add
