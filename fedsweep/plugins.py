"""The plug-in interface: base classes of methods, strategies and metrics; decorators for heads, data and partitions.

`use` loads a plug-in, as the option --import does. A study refers to heads, sources and partitions by their registered
name and a parameter: `model: wide:64`, `source: sensors:2024`, `partitions: [by-size:2]`.

Stability: provisional. Names stay; the hooks of `Method` and `Strategy` may gain optional arguments in minor releases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from orchestrator.search.candidates import Candidate, Rank
from orchestrator.search.history import History
from orchestrator.search.strategies.ask_tell import AskTellStrategy, BatchSettings, Result, Searcher
from orchestrator.search.strategies.base import Proposal, Strategy
from orchestrator.search.task import SearchTask, StageRounds
from orchestrator.section import Section
from search_spaces import Configuration, SearchSpace
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
from trainables.metrics.base import Metric, Predictions
from trainables.models import Model
from trainables.models.head import Head, Weights
from trainables.plugins import use
from trainables.privacy.plan import Event

__all__ = [
    "AskTellStrategy",
    "BatchSettings",
    "Candidate",
    "ClientProgram",
    "ClientRound",
    "Configuration",
    "Event",
    "FeatureSet",
    "Head",
    "History",
    "Hyperparameter",
    "Hypers",
    "Method",
    "Metric",
    "Model",
    "PartitionSpec",
    "Predictions",
    "Proposal",
    "Rank",
    "Result",
    "Rows",
    "Run",
    "SearchSpace",
    "SearchTask",
    "Searcher",
    "Section",
    "StageRounds",
    "State",
    "Strategy",
    "UserError",
    "Weights",
    "data_source",
    "head",
    "learning_rate",
    "network",
    "partition",
    "use",
]

NetworkFunction = Callable[[int, int], Any]
HeadFunction = Callable[[str, int, int], Model]
Source = Callable[[str], Mapping[str, NDArray[Any]]]
Partitioner = Callable[[FeatureSet, PartitionSpec], list[Rows]]


def head(name: str) -> Callable[[HeadFunction], HeadFunction]:
    """Register a function that returns a `Model`, for models that compute their own clipped gradients; a subclass of
    `Head` is simpler. The function gets the text after the colon, the number of features and the number of classes."""
    return _register(name, models.HEADS, {form.partition(":")[0] for form in models.FORMS}, "head")


def network(name: str) -> Callable[[NetworkFunction], NetworkFunction]:
    """Register a network whose layers are trained. The function gets the number of features and the number of classes.
    It returns a torch module with its weights: an `nn.Sequential`, or a module with a method `stages` that returns
    one."""
    return _register(name, models.NETWORKS, {"resnet20", "resnet32", "resnet44", "resnet56", "vgg16"}, "network")


def data_source(name: str) -> Callable[[Source], Source]:
    """Register a data source. The function gets the text after the colon and returns the arrays of a feature file."""
    return _register(name, features.PLUGIN_SOURCES, {"synthetic", "synthetic-frozen", "simulated"}, "data source")


def partition(name: str) -> Callable[[Partitioner], Partitioner]:
    """Register a partition. The function gets the data and a `PartitionSpec` (parameter, clients, seed) and returns the
    train rows of every client; each row belongs to exactly one client."""
    return _register(
        name, partitions.PLUGIN_PARTITIONS, {form.partition(":")[0] for form in partitions.FORMS}, "partition"
    )


def _register(name: str, known: dict[str, Any], reserved: set[str], what: str) -> Callable[[Any], Any]:
    if not name or ":" in name or name in reserved:
        raise UserError(f"a {what} cannot be called {name!r}: the name is reserved, empty or contains a colon")

    def add(function: Any) -> Any:
        existing = known.get(name)
        if existing is not None and existing.__module__ != function.__module__:
            raise UserError(f"a {what} {name!r} already exists, in {existing.__module__}")
        known[name] = function
        return function

    return add
