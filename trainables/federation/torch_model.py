"""A saved model as a torch module: the backbone, if the model records one, and the head."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainables import plugins
from trainables.data.backbones import backbone as backbones
from trainables.data.backbones.extraction import features_of
from trainables.data.backbones.own_rows import as_rgb
from trainables.data.feature_file import read_backbone
from trainables.data.sources.preparing import Options, chosen_backbone
from trainables.errors import UserError
from trainables.models import Model
from trainables.models.softmax import SoftmaxHead


class TorchModel(torch.nn.Module):
    """Maps the input of the backbone or, without a backbone, features to class scores."""

    def __init__(self, backbone: backbones.Backbone | None, head: Model, weights: Tensor) -> None:
        super().__init__()
        self.backbone = torch.nn.Identity() if backbone is None else _Penultimate(backbone.network)
        self.head = _linear(head, weights) if isinstance(head, SoftmaxHead) else _Head(head, weights)
        self._backbone = backbone

    def preprocess(self, rows: Any) -> Any:
        """The backbone's input for one or several images (PIL, of any size) or texts."""
        if self._backbone is None:
            raise UserError("the model records no backbone; it takes features")
        if isinstance(rows, str) or not isinstance(rows, Iterable):
            rows = [rows]
        rows = (row if isinstance(row, str | np.ndarray) else as_rgb(row) for row in rows)
        return self._backbone.to_input(rows, next((weight.device for weight in self.parameters()), torch.device("cpu")))

    def forward(self, x: Any) -> Tensor:
        return self.head(self.backbone(x))


class _Penultimate(torch.nn.Module):
    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Any) -> Tensor:
        return features_of(self.network)(x)


class _Head(torch.nn.Module):
    def __init__(self, head: Model, weights: Tensor) -> None:
        super().__init__()
        self._head = head
        self.weights = torch.nn.Parameter(weights)

    def forward(self, features: Tensor) -> Tensor:
        x = features.float()
        return self._head.scores(torch.cat([x, torch.ones_like(x[:, :1])], dim=1), self.weights)


def _linear(head: SoftmaxHead, weights: Tensor) -> torch.nn.Linear:
    matrix = weights.view(head.rows, head.classes)
    layer = torch.nn.Linear(head.rows - 1, head.classes)
    layer.load_state_dict({"weight": matrix[:-1].T, "bias": matrix[-1]})
    return layer


def backbone_of(record: str, *, named: str = "", weights: Path | None = None) -> backbones.Backbone:
    """The backbone that a model records. If it is a Python function, it runs only if the user names it in `named`."""
    recorded = read_backbone(record)
    name = recorded["name"]
    if backbones.is_function(name) and not named:
        raise UserError(
            f"the model's backbone is {name!r}, Python code that runs only if you name it: "
            f"--backbone {shlex.quote(name)}, or to_torch({name!r})"
        )
    function = plugins.use_function(named) if named else None
    found = chosen_backbone(named or name, Options(weights=weights, function=function))
    if found.details.get("weights") != recorded["details"].get("weights"):
        raise UserError(f"backbone {named or name!r} does not have the weights that the model was trained with")
    return found.of_texts(recorded["rows"] == backbones.TEXTS)
