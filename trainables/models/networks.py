"""Networks whose layers train: packaged ones with their weights, and those of plug-ins.

A network is a chain of named stages, and the last one is its head, a linear layer. An `nn.Sequential` is such a chain;
another module has a method `stages` that returns one, as an `nn.Sequential` or as a dict of modules. The first stage
takes rows of features. A module can be several stages, such as an activation without parameters.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from trainables import plugins
from trainables.data import backbones
from trainables.data.backbones.extraction import normalised
from trainables.data.sources import fetching
from trainables.data.sources.catalogue import WEIGHTS
from trainables.errors import LOAD_A_PLUGIN, UserError
from trainables.files import current_folder
from trainables.models.network_settings import NETWORKS, NetworkSettings
from trainables.models.safetensors import NAMES


@dataclass(frozen=True)
class Network:
    """A module, and the chain of stages that computes the same from rows of features."""

    module: nn.Module
    stages: dict[str, nn.Module]

    @property
    def takes_images(self) -> bool:
        """Whether a further first stage turns rows into the module's images."""
        return isinstance(next(iter(self.stages.values()), None), Pixels)

    @cached_property
    def weights_hash(self) -> str:
        """Hash of all parameters and buffers, without those of the head, which is replaced."""
        found = hashlib.sha256()
        replaced = {id(value) for value in list(self.stages.values())[-1].state_dict(keep_vars=True).values()}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if id(value) in replaced:
                continue
            value = value.detach()
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]


class Pixels(nn.Module):
    """Rows of pixels / 255, (height, width, channels), as the input of a packaged network."""

    def forward(self, rows: Tensor) -> Tensor:
        size = backbones.CIFAR_SIZE
        images = rows.unflatten(1, (size, size, 3))
        return normalised(images * 255, backbones.CIFAR10_MEAN, backbones.CIFAR10_STD)


def load(settings: NetworkSettings, features: int, classes: int) -> Network:
    name = settings.network
    if name in backbones.BACKBONES:
        return _packaged(settings, features)
    if name not in NETWORKS:
        plugins.load_all()
    if name not in NETWORKS:
        known = [*(name for name, made in backbones.BACKBONES.items() if _has_stages(made)), *NETWORKS]
        raise UserError(f"network = {name!r} is unknown; choose one of: {', '.join(known)}{LOAD_A_PLUGIN}")
    if settings.weights:
        raise UserError(f"weights = {settings.weights!r}: the plug-in that defines network {name!r} loads its weights")
    network = _of_plugin(name, features, classes)
    if network.weights_hash != _of_plugin(name, features, classes).weights_hash:
        raise UserError(
            f"network {name!r} has other weights each time it is made; load them from a file, or call "
            "torch.manual_seed before"
        )
    return network


def _of_plugin(name: str, features: int, classes: int) -> Network:
    module = NETWORKS[name](features, classes)
    made = getattr(module, "stages", None)
    stages = made() if callable(made) and not isinstance(made, nn.Module) else module
    if isinstance(stages, nn.Sequential):
        stages = stages._modules  # named_children leaves out the second use of a module
    if not isinstance(stages, Mapping) or not all(isinstance(stage, nn.Module) for stage in stages.values()):
        raise UserError(
            f"network {name!r} must be a torch.nn.Sequential, or have a method `stages` that returns one or a dict of "
            "modules"
        )
    if not stages:
        raise UserError(f"network {name!r} has no stages")
    network = Network(module.float(), dict(stages))
    for entry, value in network.module.state_dict().items():
        if not isinstance(value, Tensor) or value.dtype not in NAMES:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"network {name!r}: a safetensors file cannot hold {entry!r} of type {kind}")
    return network


@cache
def file_hash(settings: NetworkSettings) -> str:
    """Hash of the file of a packaged network's weights; empty for a plug-in's."""
    return backbones.weights_sha256(_weights_file(settings))[:16] if settings.network in backbones.BACKBONES else ""


def _packaged(settings: NetworkSettings, features: int) -> Network:
    name, size = settings.network, backbones.CIFAR_SIZE
    if not _has_stages(backbones.BACKBONES[name]):
        raise UserError(f"network = {name!r} has no stages to cut at")
    if features != 3 * size * size:
        raise UserError(
            f"network = {name!r} takes {size} x {size} pixels of 3 colours, {3 * size * size} numbers a row; the data "
            f"has {features} features"
        )
    module = backbones.load(name, _weights_file(settings))
    return Network(module, {"pixels": Pixels(), **module.stages()})  # type: ignore[operator]


@cache
def _has_stages(made: Callable[[int], nn.Module]) -> bool:
    return hasattr(getattr(made, "func", made), "stages")


def _weights_file(settings: NetworkSettings) -> Path:
    """A file of the user, relative to the current folder or the folder of data files; or the published one."""
    if not settings.weights:
        copied = "put it into the current folder, and add weights=FILE to the model"
        return fetching.fetch(WEIGHTS[settings.network], advice=copied)
    places = [current_folder(), fetching.data_folder()]
    found = next((place / settings.weights for place in places if os.path.isfile(place / settings.weights)), None)
    if found is None:
        raise UserError(f"weights {settings.weights!r} are neither in the current folder nor in {places[1]}")
    return found
