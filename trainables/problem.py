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
from trainables.models import Model
from trainables.spec import ProblemSpec


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
        held_out = data.validation_rows(spec.data.validation_fraction, spec.data.validation_seed)
        if spec.train_on == "train":
            dealt = dealt.without(held_out)
        if spec.evaluate_on == "test":
            return cls(spec, data, dealt, data.x_test, data.y_test)
        return cls(spec, data, dealt, data.x_train[held_out], data.y_train[held_out])

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
    """Puts problems into the object store, the features of a data set only once."""

    def __init__(self) -> None:
        self._features: dict[str, tuple[Any, Any]] = {}
        self._shipped: dict[str, Shipment] = {}

    def ship(self, problem: Problem) -> Shipment:
        key = problem.spec.key
        if key not in self._shipped:
            data = problem.data
            if data.fingerprint not in self._features:
                x_train = data.x_train if isinstance(data.x_train, StoredRows) else ray.put(data.x_train)
                self._features[data.fingerprint] = (x_train, ray.put(data.y_train))
            x, y = self._features[data.fingerprint]
            self._shipped[key] = Shipment(
                key,
                problem.model,
                problem.partition.sizes,
                x,
                y,
                ray.put(problem.partition.rows),
                ray.put(problem.x_eval),
                ray.put(problem.y_eval),
                problem.truth,
            )
        return self._shipped[key]


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
