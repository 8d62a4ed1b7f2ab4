"""What a study says about a network whose layers train.

As a mapping, `model: {network: resnet20, cut: layer3, train: [norm, head]}`; in a trial, as one line of text,
`network:resnet20,cut=layer3,train=norm+head`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from trainables.errors import UserError, in_range, one_of

NAME = "network"
FORM = f"{NAME}:NAME,cut=STAGE,train=norm+head"
KINDS = ("norm", "bias", "lora", "head")
NO_CUT = "none"
SUFFIX, ACCOUNT = ".safetensors", "fedsweep"
"""Of the file of a saved network: its ending, and the name of the trial and its account in the metadata."""
HYPERPARAMETERS = ("norm_scale", "bias_scale", "lora_scale", "rank")
"""Settings that may also be hyperparameters of a trial."""

NETWORKS: dict[str, Callable[[int, int], Any]] = {}
"""Networks of plug-ins by name: called with the numbers of features and classes, they return a torch module."""


@dataclass(frozen=True)
class NetworkSettings:
    """A network, where it is cut, and which parameters train from the cut on."""

    network: str
    """A packaged network, or a plug-in's."""
    cut: str = NO_CUT
    """The first stage that is computed in every round; `none`: all of them are."""
    train: tuple[str, ...] = ("norm", "head")
    """Kinds of parameters; `KIND:PATTERN` restricts a kind to layers whose names match."""
    weights: str = ""
    """A state dict for a packaged network; default: the published one."""
    norm_scale: float = 0.1
    """Scale of norm parameters: they train as SCALE x value, so a scale below 1 slows them down against the head and
    gives them a smaller part of the clip."""
    bias_scale: float = 0.1
    """Scale of biases."""
    lora_scale: float = 1.0
    """Scale of the product of the LoRA factors."""
    rank: int = 4
    """Rank of the LoRA factors."""

    def __post_init__(self) -> None:
        for name in (self.network, self.cut, self.weights, *self.train):
            if any(character in name for character in ",=+") or name != name.strip():
                raise UserError(f"model: {name!r} has one of the characters , = + or begins or ends with a blank")
        if not self.network:
            raise UserError(f"model = '{NAME}:' names no network; write {FORM}")
        kinds = [name.partition(":")[0] for name in self.train]
        for kind in kinds:
            one_of(KINDS, **{"model: train": kind})
        if "head" not in self.train:
            raise UserError(f"model: train = {'+'.join(self.train)} lacks the head, which has to learn the classes")
        if pattern := next((name for name in self.train if name.startswith("head:")), None):
            raise UserError(f"model: train = {pattern}: the head is one layer and takes no pattern")
        if len(set(self.train)) < len(self.train):
            raise UserError(f"model: train = {'+'.join(self.train)} names a kind twice")
        for name in HYPERPARAMETERS[:-1]:
            in_range(0, math.inf, "()", **{name: getattr(self, name)})
        in_range(1, 1024, rank=self.rank)

    def patterns(self, kind: str) -> list[str]:
        """The patterns of the names of the layers that train; empty if this kind does not train."""
        named = [name.partition(":") for name in self.train]
        return [pattern or "*" for found, _, pattern in named if found == kind]

    def with_scales(self, scale: float) -> NetworkSettings:
        """The settings with the same scale for all kinds of parameters."""
        return replace(self, norm_scale=scale, bias_scale=scale, lora_scale=scale)

    def with_hyperparameters(self, given: Mapping[str, Any]) -> NetworkSettings:
        """The settings with those hyperparameters of a trial that belong to the model."""
        own = {name: given[name] for name in HYPERPARAMETERS if name in given}
        self._check_trained(own)
        return replace(self, **own)

    def _check_trained(self, hyperparameters: Mapping[str, Any]) -> None:
        """Raise if one of them belongs to a kind that does not train."""
        trained = {name.partition(":")[0] for name in self.train}
        for name, value in hyperparameters.items():
            kind = "lora" if name == "rank" else name.removesuffix("_scale")
            if kind not in trained:
                raise UserError(f"{name} = {value}: model = {self.text!r} trains no {kind} parameters")

    @property
    def text(self) -> str:
        """As in a trial's specification: settings at their defaults are left out, except for the cut and the kinds."""
        values = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        stated = {
            field.name: _shortest(values[field.name]) if isinstance(field.default, float) else values[field.name]
            for field in fields(self)[3:]
            if values[field.name] != field.default
        }
        parts = {"cut": self.cut, "train": "+".join(self.train), **stated}
        return f"{NAME}:" + ",".join([self.network, *(f"{name}={value}" for name, value in parts.items())])

    @classmethod
    def parse(cls, text: str) -> NetworkSettings:
        network, *others = text.removeprefix(f"{NAME}:").split(",")
        given: dict[str, Any] = {}
        for part in others:
            name, equals, value = part.partition("=")
            if not equals or name in given:
                raise UserError(f"model = {text!r}: {part!r} is not one NAME=VALUE; write {FORM}")
            given[name] = value.split("+") if name == "train" else value
        return cls.from_mapping({"network": network, **given})

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> NetworkSettings:
        """From a study's mapping."""
        known = {field.name: field for field in fields(cls)}
        for name in given:
            one_of(known, **{"model: key": str(name)})
        values = {name: value for name, value in given.items() if value is not None}
        kinds = values.get("train", known["train"].default)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list | tuple) or not all(isinstance(kind, str) for kind in kinds):
            raise UserError(f"model: train = {kinds!r} is not a list of kinds such as [norm, head]")
        values["train"] = tuple(kinds)
        numbers = [name for name in HYPERPARAMETERS if name in values]
        for name in numbers:
            values[name] = _number(name, values[name], whole=name == "rank")
        for name in ("network", "cut", "weights"):
            values[name] = str(values.get(name, known[name].default if name != "network" else ""))
        settings = cls(**values)
        settings._check_trained({name: values[name] for name in numbers})
        return settings


def is_network(text: str) -> bool:
    return text.startswith(f"{NAME}:")


def _number(name: str, value: Any, whole: bool) -> float | int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UserError(f"model: {name} = {value!r} is not a number") from None
    if whole and not number.is_integer():
        raise UserError(f"model: {name} = {value!r} is not a whole number")
    return int(number) if whole else number


def _shortest(value: float) -> str:
    """With as many digits as it needs."""
    return short if float(short := f"{value:g}") == value else repr(value)
