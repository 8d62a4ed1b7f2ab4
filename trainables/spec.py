"""What a trial is: everything that can change its result, and nothing else. Its key is the hash of that."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from trainables.errors import in_range
from trainables.privacy.plan import PrivacySettings

ENGINE_VERSION = 4  # raise it when a change of the code changes results: old rows then no longer count as done
HEAD_VERSIONS = {"mlp": 2}  # the same for one head alone: rows of the others still count

HyperValue = float | int | bool | str


def _hash(text: str) -> str:
    return hashlib.sha256(f"{ENGINE_VERSION}:{text}".encode()).hexdigest()[:24]


class Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copy = super().model_copy(update=update, deep=deep)
        copy.__dict__.pop("key", None)  # the key of the original
        return copy

    @cached_property
    def key(self) -> str:
        """A stable name for the content."""
        return _hash(self._text())

    def _text(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


class DataSpec(Spec):
    """A data set, named by its content: a feature file's hash, or a generator with its settings."""

    fingerprint: str
    validation_fraction: float = 0.1
    validation_seed: int = 42


class PartitionSpec(Spec):
    """How the train rows are dealt out to the clients."""

    kind: str
    """iid, dirichlet, classes, explicit, or a plug-in's."""
    parameter: float = 0.0
    """dirichlet: alpha. classes: how many classes a client holds."""
    clients: int = 20
    seed: int = 42


class ProblemSpec(Spec):
    """What the clients hold and what the model is judged on."""

    data: DataSpec
    partition: PartitionSpec
    train_on: Literal["train", "all"]
    """`train` keeps the validation split out of the clients' rows; `all` gives them every train row."""
    evaluate_on: Literal["validation", "test"]
    model: str = "softmax"

    def _text(self) -> str:
        version = HEAD_VERSIONS.get(self.model.partition(":")[0])
        return super()._text() if version is None else f"{version}:{super()._text()}"


Aggregate = Literal["uniform", "size"]
AGGREGATES: tuple[Aggregate, ...] = ("uniform", "size")
Precision = Literal["float32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")


class Preprocess(BaseModel):
    """What is done to the features once, before the first round."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    center: float = 0.0
    """The part of the budget, of mu squared, that a private mean of the features may spend; 0: they stay as they are.
    Without it one pays for the features' length, with it for their spread."""
    bound: float = 16.0
    """l2 bound on a row in that mean."""

    def check(self) -> Preprocess:
        in_range(0, 1, open_high=True, center=self.center)
        in_range(0, math.inf, open_low=True, open_high=True, bound=self.bound)
        return self


def last_round(rounds: int, stop_rule: str) -> int:
    return int(stop_rule.removeprefix("after ")) if stop_rule else rounds


class TrialSpec(Spec):
    """One training run."""

    problem: ProblemSpec
    method: str
    hyperparameters: dict[str, HyperValue]
    privacy: PrivacySettings
    rounds: int
    evaluate_every: int = 10
    seed: int = 42
    preprocess: Preprocess = Preprocess()
    aggregate: Aggregate = "uniform"
    """How clients weigh in the mean of their releases: all the same, or by |D_i|."""
    stop_rule: str = ""
    """`after 20`: it ends after that many of the rounds it has paid for; empty where it runs to its end."""
    precision: Precision = "float32"
    """Of the products that gradients are made of, on a GPU; sums are in float32 or better."""
    code: str = ""
    """Of a plug-in's method: what its code was."""

    @property
    def last_round(self) -> int:
        """That is computed."""
        return last_round(self.rounds, self.stop_rule)

    @cached_property
    def key(self) -> str:
        """As for any specification, with the problem by its own key: there may be very many trials of a problem."""
        later = {name for name, usual in (("code", ""), ("precision", "float32")) if getattr(self, name) == usual}
        rest = self.model_dump(mode="json", exclude={"problem", *later})  # as keys were before there was such a thing
        text = json.dumps({**rest, "problem": self.problem.key}, sort_keys=True, separators=(",", ":"))
        return _hash(text)
