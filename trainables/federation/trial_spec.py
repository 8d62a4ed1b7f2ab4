"""The specification of a trial: everything that can change its result. The trial's key is the hash of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from trainables.choices import Aggregate, EvaluateOn, Precision, TrainOn, ValidationBy
from trainables.data.partition import PartitionSpec
from trainables.errors import UserError, in_range
from trainables.privacy.plan import PrivacySettings
from trainables.spec import HyperValue, Spec, content_key


class DataSpec(Spec):
    """A data set, identified by its content: the hash of a feature file, or a generator with its parameters."""

    fingerprint: str
    validation_fraction: float = 0.1
    validation_seed: int = 42
    validation_by: ValidationBy = Field(default="row", exclude_if=lambda by: by == "row")
    stratified: bool = Field(default=True, exclude_if=bool)
    """Whether every class has its share of the validation rows. False if results may be published, because such a
    split would reveal labels."""


class ProblemSpec(Spec):
    """Which rows each client holds, and which rows evaluate the model."""

    data: DataSpec
    partition: PartitionSpec
    train_on: TrainOn
    """`train` removes the validation rows from the clients' rows; `all` keeps every train row."""
    evaluate_on: EvaluateOn
    model: str = "softmax"


class Preprocess(BaseModel):
    """Preprocessing of the features, applied once before the first round."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    center: float = 0.0
    """Share of the budget (of mu squared) spent on a private mean that is subtracted from the features; 0 disables
    centring. Centring makes the noise scale with the features' spread instead of their length."""
    bound: float = 16.0
    """l2 bound on a row in that mean, after scaling."""
    shrink: bool = Field(default=False, exclude_if=lambda shrink: not shrink)
    """Whether that mean is shrunk towards 0, by an amount that grows with the share of noise in it."""
    scale: float = Field(default=0.0, exclude_if=lambda share: not share)
    """Share of the budget (of mu squared) spent on a private estimate of the typical length of a row, by which the
    features are scaled; 0: it is not estimated."""
    length: float = Field(default=0.0, exclude_if=lambda length: not length)
    """Typical length of a row, if it is public knowledge, by which the features are scaled; 0: not given."""

    def check(self) -> Preprocess:
        in_range(0, 1, "[)", center=self.center)
        in_range(0, 1, "[)", scale=self.scale)
        in_range(0, 1, "[)", **{"center + scale": self.center + self.scale})
        in_range(0, math.inf, "()", bound=self.bound)
        in_range(0, math.inf, "[)", length=self.length)
        if self.scale and self.length:
            raise UserError(f"length = {self.length:g} and scale = {self.scale:g}: give only one of them")
        return self

    @property
    def scales(self) -> bool:
        return self.scale > 0 or self.length > 0


class TrialSpec(Spec):
    """One training run."""

    problem: ProblemSpec
    method: str
    hyperparameters: dict[str, HyperValue]
    privacy: PrivacySettings
    rounds: int
    """Rounds that the privacy plan covers."""
    stop_after: int | None = None
    """Last round to run, if the trial ends before `rounds`: a lower rung of successive halving."""
    evaluate_every: int = 10
    seed: int = 42
    """Seed of the initial weights and other public choices, and of the noise unless that is secret."""
    preprocess: Preprocess = Preprocess()
    aggregate: Aggregate = "uniform"
    """Weight of each client in the mean of the releases: equal, or proportional to |D_i|."""
    precision: Precision = "float32"
    """Precision of the factors of matrix products; sums use float32 or better."""
    metrics: tuple[str, ...] = ()
    """Metrics to evaluate in addition to those that every trial has."""
    code: str = ""
    """Hash of the code of the plug-ins that the trial uses; empty without plug-ins."""
    noise_key: str = Field(default="", repr=False, exclude_if=lambda key: not key)
    """128 secret bits, in hexadecimal digits. Noise and secret samples depend on them and on the seed. Empty: they
    depend on the seed alone."""

    @property
    def last_round(self) -> int:
        """Last round actually run."""
        return self.rounds if self.stop_after is None else self.stop_after

    @cached_property
    def full_key(self) -> str:
        """The key of the same trial with all its rounds: trials that differ only in `stop_after` share it."""
        return self.key if self.stop_after is None else self.model_copy(update={"stop_after": None}).key

    @cached_property
    def key(self) -> str:
        """The hash of the specification, with the problem's key in place of the problem, which many trials share."""
        return content_key(_as_json(self._hashed()))

    def _hashed(self) -> dict[str, Any]:
        """What the key is the hash of."""
        defaults = set() if self.metrics else {"metrics"}
        return self.model_dump(mode="json", exclude={"problem", *defaults}) | {"problem": self.problem.key}

    @classmethod
    def trusted(cls, fields: dict[str, Any]) -> TrialSpec:
        """A trial with these fields, complete and valid. Like `model_construct`, but ten times as fast."""
        trial = cls.__new__(cls)
        object.__setattr__(trial, "__dict__", fields)
        object.__setattr__(trial, "__pydantic_fields_set__", ALL_FIELDS)
        object.__setattr__(trial, "__pydantic_extra__", None)
        object.__setattr__(trial, "__pydantic_private__", None)
        return trial

    @staticmethod
    def set_keys(trials: Sequence[TrialSpec]) -> None:
        """Compute the keys of trials that differ only in seed and problem: faster than one by one."""
        if not trials:
            return
        text = _as_json(trials[0]._hashed() | {"seed": SEED, "problem": PROBLEM})
        problem, seed = _as_json(PROBLEM), _as_json(SEED)
        for trial in trials:
            own = text.replace(problem, f'"{trial.problem.key}"', 1).replace(seed, str(trial.seed), 1)
            vars(trial)["key"] = content_key(own)


PROBLEM, SEED = "\0problem", "\0seed"
"""Placeholders, which no other text in a specification contains."""
ALL_FIELDS = set(TrialSpec.model_fields)  # shared: one set per trial would be a quarter of a trial's memory
# `json.dumps` would create an encoder for every call
_as_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
