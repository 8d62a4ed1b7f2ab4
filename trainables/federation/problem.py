"""A prepared problem: the rows every client trains on and the rows that evaluate the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from trainables import models
from trainables.data.features import FeatureSet
from trainables.data.partition import Partition, partition
from trainables.data.validation import hold_out
from trainables.federation.trial_spec import ProblemSpec
from trainables.models import Model


@dataclass(frozen=True)
class Problem:
    spec: ProblemSpec
    data: FeatureSet
    partition: Partition
    x_eval: NDArray[np.float32]
    y_eval: NDArray[np.int64]
    clients_eval: NDArray[np.int64] | None = None
    """The client of every row that evaluates the model. None unless the partition is `explicit` and the data set names
    the clients of its test rows."""

    @classmethod
    def prepare(cls, data: FeatureSet, spec: ProblemSpec) -> Problem:
        """All train rows are partitioned; `train_on: train` then removes the validation rows."""
        clients = partition(data, spec.partition)
        by_client = spec.partition.kind == "explicit" and data.client_test is not None
        test = data.x_test, data.y_test, data.client_test if by_client else None
        if spec.train_on == "all":
            return cls(spec, data, clients, *test)
        content = spec.data
        without, validation = hold_out(
            *(data, clients, content.validation_by, content.validation_fraction, content.validation_seed),
            stratified=content.stratified,
        )
        if spec.evaluate_on == "test":
            return cls(spec, data, without, *test)
        of_rows = data.client_train[validation.rows] if by_client and data.client_train is not None else None
        return cls(spec, data, without, validation.x, validation.y, of_rows)

    @cached_property
    def model(self) -> Model:
        return models.parse(self.spec.model, features=self.data.features, classes=self.data.classes)

    @property
    def truth(self) -> NDArray[np.float64] | None:
        """The weights that the labels were drawn from, if they were drawn from this model; else None."""
        return self.data.truth if self.spec.model == self.data.task else None


@runtime_checkable
class RemoteArray(Protocol):
    """An array that is kept elsewhere, for example in Ray's object store."""

    def load(self) -> Any: ...


@dataclass(frozen=True)
class ProblemData:
    """What servers and client hosts need of a problem. `load` gives an array, wherever it is kept."""

    key: str
    model: Model
    sizes: tuple[int, ...]
    """|D_i|: public, and the divisor of releases. Neighbouring data sets have the same sizes."""
    x: Any
    y: Any
    rows: Any
    x_eval: Any
    y_eval: Any
    truth: NDArray[np.float64] | None = None
    clients_eval: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, problem: Problem) -> ProblemData:
        """With all arrays in this process."""
        return cls(
            problem.spec.key,
            problem.model,
            problem.partition.sizes,
            problem.data.x_train,
            problem.data.y_train,
            problem.partition.rows,
            problem.x_eval,
            problem.y_eval,
            problem.truth,
            problem.clients_eval,
        )

    def load(self, name: str) -> Any:
        array = getattr(self, name)
        return array.load() if isinstance(array, RemoteArray) else array
