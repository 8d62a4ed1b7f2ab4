"""A problem made ready: the rows every client trains on and the rows the model is judged on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from trainables import models
from trainables.data.features import FeatureSet
from trainables.data.partition import Partition, partition
from trainables.data.stored import StoredRows
from trainables.federation.trial_spec import ProblemSpec
from trainables.models import Model


@dataclass(frozen=True)
class Problem:
    spec: ProblemSpec
    data: FeatureSet
    partition: Partition
    x_eval: NDArray[np.float32]
    y_eval: NDArray[np.int64]

    @classmethod
    def prepare(cls, data: FeatureSet, spec: ProblemSpec) -> Problem:
        """Clients are dealt all train rows; `train_on: train` then takes the validation rows from each."""
        dealt = partition(data, spec.partition)
        held_out = data.validation_set(spec.data.validation_fraction, spec.data.validation_seed)
        if spec.train_on == "train":
            dealt = dealt.without(held_out.rows)
        if spec.evaluate_on == "test":
            return cls(spec, data, dealt, data.x_test, data.y_test)
        return cls(spec, data, dealt, held_out.x, held_out.y)

    @cached_property
    def model(self) -> Model:
        return models.parse(self.spec.model, features=self.data.features, classes=self.data.classes)

    @property
    def truth(self) -> NDArray[np.float64] | None:
        """The weights that the labels were drawn from, where they were drawn from this very model."""
        return self.data.truth if self.spec.model == self.data.task else None


@dataclass(frozen=True)
class Shipment:
    """A problem on its way to actors. The arrays are held by the object store, once per node, or lie in their file;
    `fetch` takes either a reference or the array itself."""

    key: str
    model: Model
    sizes: tuple[int, ...]
    """|D_i|, which everybody knows and releases are divided by. A neighbour of the data has the same."""
    x: Any
    y: Any
    rows: Any
    x_eval: Any
    y_eval: Any
    truth: NDArray[np.float64] | None = None


def fetch(value: Any) -> Any:
    return ray.get(value) if isinstance(value, ray.ObjectRef) else value


class Shipper:
    """Puts problems into the object store as they are asked for, and every array only once: problems that differ in
    their partition share features, labels and the rows that judge."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[Any, Any]] = {}
        """References by the array, which is kept: so its number stays its own."""
        self._shipped: dict[str, Shipment] = {}
        self._references: dict[str, Any] = {}

    def ship(self, problem: Problem) -> Shipment:
        key = problem.spec.key
        if key not in self._shipped:
            data = problem.data
            self._shipped[key] = Shipment(
                key,
                problem.model,
                problem.partition.sizes,
                data.x_train if isinstance(data.x_train, StoredRows) else self._put(data.x_train),
                self._put(data.y_train),
                self._put(problem.partition.rows),
                self._put(problem.x_eval),
                self._put(problem.y_eval),
                problem.truth,
            )
        return self._shipped[key]

    def reference(self, problem: Problem) -> Any:
        """To the shipment itself, for whoever only passes it on."""
        key = problem.spec.key
        if key not in self._references:
            self._references[key] = ray.put(self.ship(problem))
        return self._references[key]

    def _put(self, array: Any) -> Any:
        if id(array) not in self._arrays:
            self._arrays[id(array)] = (array, ray.put(array))
        return self._arrays[id(array)][1]


def in_process(problem: Problem) -> Shipment:
    """For hosts that live in the caller's own process."""
    return Shipment(
        problem.spec.key,
        problem.model,
        problem.partition.sizes,
        problem.data.x_train,
        problem.data.y_train,
        problem.partition.rows,
        problem.x_eval,
        problem.y_eval,
        problem.truth,
    )
