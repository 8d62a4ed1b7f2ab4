"""Train one model from Python: weights, metrics and privacy account.

Stability: public. `train` may gain options; the fields of `Model` and `Account` are stable.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from orchestrator.execution import training
from orchestrator.execution.training_options import TrainingOptions
from trainables.choices import Release
from trainables.errors import UserError
from trainables.federation.saved_model import SavedModel
from trainables.spec import HyperValue

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Account:
    """The privacy account of a training run."""

    claimed: float
    """The requested eps."""
    actual: Mapping[Release, float]
    """The eps that the noise provides, by release model: local and secure-aggregation."""
    unsampled: Mapping[Release, float]
    """The actual eps against an adversary who knows which rows, or users, were sampled."""
    delta: float
    """The delta of all these eps."""
    noise_multiplier: float
    """The papers' sigma_g, of the method's first kind of release: a client's noise has the standard deviation
    clip sigma_g / sqrt(clients)."""


@dataclass(frozen=True)
class Model:
    """The outcome of a training run."""

    state: str
    """`done` or `diverged`."""
    weights: NDArray[np.float32] | None
    """The trained weights, in the layout of the model. A linear head has (features + 1) x classes weights, and the last
    row is the bias. None if the run diverged."""
    metrics: Mapping[str, Mapping[int, float]]
    """accuracy, loss, train_loss, ...; each maps a round to a value."""
    account: Account
    """The privacy account."""
    hyperparameters: Mapping[str, HyperValue]
    """All hyperparameters of the method, including defaults."""
    seconds_per_round: float
    """Mean time of a round."""
    key: str | None
    """Hash of everything that can change the result; None for a run with secret noise."""
    _saved: SavedModel | None = field(repr=False)

    @property
    def accuracy(self) -> float | None:
        """Accuracy after the last evaluated round, in percent; None if the labels are not classes."""
        by_round = self.metrics.get("accuracy") or {}
        return by_round[max(by_round)] if by_round else None

    def predict(self, x: NDArray[np.float32]) -> NDArray[np.int64] | NDArray[np.str_]:
        """The most likely class of every row: the class name, or the number if the labels were numbers from 0. `x` has
        the features as in the data file, without preprocessing."""
        return self._require_saved().predict(x)

    def save(self, path: str | Path) -> None:
        """Save the model with its provenance and privacy account, as `fedsweep train --save` does. `load_model` and
        `fedsweep predict` read the file; that of a network, which is in the safetensors format, loads into the plain
        torch module."""
        self._require_saved().save(Path(path))

    def to_torch(self, backbone: str = "") -> torch.nn.Module:
        """The model as a torch module: backbone and head, or only the head if the features came without a backbone. A
        network is the chain of its stages. `backbone`: MODULE:FUNCTION of your own backbone. The function is called."""
        return self._require_saved().to_torch(backbone)

    def _require_saved(self) -> SavedModel:
        if self._saved is None:
            raise UserError(f"the run ended as {self.state!r}: there is no model")
        return self._saved


def load_model(path: str | Path) -> SavedModel:
    """Load a model saved by `Model.save` or `fedsweep train --save`: weights, `predict`, `scores` and `provenance`."""
    return SavedModel.load(Path(path))


P = ParamSpec("P")
R = TypeVar("R")
Data = str | Path | Mapping[str, NDArray[Any]]


def _with_options(
    options: Callable[P, TrainingOptions],
) -> Callable[[Callable[[Data, TrainingOptions], R]], Callable[Concatenate[Data, P], R]]:
    """Turn a function of data and options into one of data and keyword arguments, as `TrainingOptions` takes them."""

    def decorate(function: Callable[[Data, TrainingOptions], R]) -> Callable[Concatenate[Data, P], R]:
        @functools.wraps(function)
        def call(data: Data, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                given = options(*args, **kwargs)
            except TypeError as error:
                raise UserError(
                    str(error).replace("TrainingOptions.__init__()", f"fedsweep.{function.__name__}")
                ) from None
            return function(data, given)

        data, *_ = inspect.signature(function).parameters.values()
        keywords = inspect.signature(options).parameters.values()
        call.__signature__ = inspect.Signature([data, *keywords])  # type: ignore[attr-defined]
        return call

    return decorate


@_with_options(TrainingOptions)
def train(data: Data, /, options: TrainingOptions) -> Model:
    """Train one model. The keyword arguments are the fields of `TrainingOptions`, which are also the options of
    `fedsweep train`; state the budget as `epsilon` or as `mu`.

    `data`: a feature file, the name of a built-in data set, or a mapping with the arrays x_train, y_train, x_test,
    y_test and, for rows that belong to clients, client_train.
    """
    prepared = training.set_up(data if isinstance(data, Mapping) else str(data), options)
    trained = training.train(prepared, address=options.address, hosts=options.hosts, on_round=options.on_round)
    trial, plan, secret = prepared.trial, prepared.plan, options.secret_noise
    claimed, delta = trial.privacy.epsilon, trial.privacy.delta
    return Model(
        state=trained.result.state,
        weights=trained.weights,
        metrics=trained.result.metrics,
        account=Account(claimed, plan.actual_epsilon, plan.unsampled, delta, plan.noise_multiplier),
        hyperparameters=trial.hyperparameters,
        seconds_per_round=trained.seconds_per_round,
        key=None if secret else trial.key,
        _saved=None if trained.weights is None else training.saved_model(prepared, trained, secret=secret),
    )
