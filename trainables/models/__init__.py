"""The interface of models, and the registry of models by name. A model is computed for many lanes at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainables import plugins
from trainables.errors import LOAD_A_PLUGIN, UserError, choices, in_range
from trainables.lazy import torch
from trainables.models.glm import Multinomial, Poisson
from trainables.models.head import defined_in
from trainables.models.mlp import MLPHead
from trainables.models.network import NetworkModel, network_model
from trainables.models.network_settings import FORM, NETWORKS, NetworkSettings, is_network
from trainables.models.shard import Diagnostics, Shard
from trainables.models.softmax import SoftmaxHead
from trainables.plugin_errors import plugin_errors

LONGEST_NUMBER = 20  # digits
FORMS = ("softmax", "mlp:HIDDEN", "logistic", "multinomial", "poisson", FORM)


HEADS: dict[str, Callable[[str, int, int], Model]] = {}
"""Heads of plug-ins by name. For `model: NAME:TEXT`, HEADS[NAME] is called with TEXT and the numbers of features and
classes."""


@plugins.on_load
def add_all(module: ModuleType) -> None:
    """Register the heads of a plug-in."""
    for name, head in defined_in(module).items():
        known = HEADS.get(name, head)
        if known.__module__ != head.__module__ or name in {form.partition(":")[0] for form in FORMS}:
            raise UserError(f"plug-in {module.__name__}: a model {name!r} exists already")
        HEADS[name] = head


class Model(Protocol):
    @property
    def dimension(self) -> int:
        """d, the number of weights."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of weights of each layer, in their order; for a `Head`, of each array."""

    @property
    def width(self) -> int:
        """Intermediate numbers per row and lane, for sizing chunks."""

    def initial(self, seed: int) -> torch.Tensor:
        """The weights before the first round, a function of the seed."""

    def clipped_gradient_sum(
        self,
        shard: Shard,
        theta: torch.Tensor,
        clip: torch.Tensor,
        *,
        diagnose: bool = False,
        automatic: bool = False,
    ) -> tuple[torch.Tensor, Diagnostics | None]:
        """sum_x f_x g_x for every client and lane, with g_x the gradient of row x and f_x its clipping factor to
        `clip`, plain or automatic (see `clipping`).

        `theta` is (lanes, d), the same for all clients, or (clients, lanes, d). The sum is (clients, lanes, d), in
        float64.
        """

    def scores(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(rows, classes) scores of rows (rows, features + 1) with weights (d,); for counts, the log of their mean."""

    def evaluate(self, shard: Shard, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mean loss per lane (lanes,), and whether each row is classified correctly (lanes, rows); None for counts."""


def operations(model: Model) -> float:
    """Floating-point operations of one row in a round: two products with the weights, or the passes of a network."""
    return model.operations if isinstance(model, NetworkModel) else 4.0 * model.dimension


def defined_by(text: str) -> Callable[..., Any] | None:
    """The function or class of a plug-in that defines a model; None for a built-in model."""
    if not is_network(text):
        return HEADS.get(text.partition(":")[0])
    return NETWORKS.get(NetworkSettings.parse(text).network)


def weights_hash(text: str, *, features: int, classes: int) -> str:
    """Hash of the weights that a network starts from; empty for other models."""
    if not is_network(text):
        return ""
    model = parse(text, features=features, classes=classes)
    assert isinstance(model, NetworkModel)
    return model.network.weights_hash


def at_cut(model: Model, x: NDArray[np.float32], device: str = "cpu", *, public_size: int = 0) -> NDArray[np.float32]:
    """Rows of features as the model takes them: for a network, its activations at the cut, computed with at least
    `public_size` rows."""
    return model.at_cut(x, device, public_size=public_size) if isinstance(model, NetworkModel) else x


def configured(model: Model, hyperparameters: Mapping[str, Any]) -> Model:
    """The model with those hyperparameters of a trial that belong to it."""
    return model.configured(hyperparameters) if isinstance(model, NetworkModel) else model


def parse(text: str, *, features: int, classes: int) -> Model:
    """The model with this name: one of `FORMS`, or a head of a plug-in."""
    kind, _, parameter = text.partition(":")
    if kind == "softmax" and not parameter:
        return SoftmaxHead(features, classes)
    if kind == "mlp" and parameter.isdecimal():
        if len(parameter) > LONGEST_NUMBER:  # Python refuses to convert more than 4300 digits
            raise UserError(f"model = '{text[:20]}...': HIDDEN has {len(parameter)} digits")
        in_range(1, 100_000, **{f"model = {text!r}: HIDDEN": int(parameter)})
        return MLPHead(features, int(parameter), classes)
    if text == "logistic" and classes != 2:
        raise UserError(f"model = 'logistic' is for two classes, the data has {classes}; multinomial is for more")
    if text in ("logistic", "multinomial"):
        return Multinomial(features, classes)
    if text == "poisson":
        return Poisson(features)
    if is_network(text):
        from trainables.models import networks  # imports torch

        settings = NetworkSettings.parse(text)
        return network_model(settings, features, classes, defined_by(text) or networks.file_hash(settings))
    if kind not in HEADS:
        plugins.load_all()
    if kind in HEADS:
        with plugin_errors(f"model {kind!r}"):
            return HEADS[kind](parameter, features, classes)
    raise UserError(f"model = {text!r} is unknown; {choices(text, [*FORMS, *HEADS])}{LOAD_A_PLUGIN}")
