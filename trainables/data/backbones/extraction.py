"""Extracts features with a frozen network. Finished pieces are saved, so an interrupted extraction resumes."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.errors import UserError, in_range, one_of
from trainables.files import replacing, subfolder

PIECE = 500  # rows per saved file
PIECE_NAME = re.compile(r"[0-9a-f]{32}\.npy|\.[0-9a-f]{32}\.npy\.[0-9a-f]{8}\.part")
ToInput = Callable[[Iterable[Any], torch.device], Any]
"""Turns some rows into the input of a network, on a device."""


class Items(Protocol):
    """Images or texts that are read when they are needed."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Iterable[Any]:
        """Items `start` to `stop - 1`."""

    def content(self, start: int, stop: int) -> str:
        """A hash that changes if one of these items changes."""


class ImageArray:
    """Images in memory: bytes (rows, height, width, channels)."""

    def __init__(self, images: NDArray[np.uint8]) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        return self._images[start:stop]

    def content(self, start: int, stop: int) -> str:
        return hashlib.sha256(self._images[start:stop].tobytes()).hexdigest()


def device_of(name: str) -> torch.device:
    one_of(("auto", "cpu", "cuda"), device=name)
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda', but this machine has no GPU that torch can use")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def normalised(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Bytes (rows, height, width, channels) as input of a network; a grey channel is repeated three times."""
    x = images.permute(0, 3, 1, 2).float() / 255
    if x.shape[1] == 1:
        x = x.expand(-1, 3, -1, -1)
    means, stds = (torch.tensor(values, device=x.device).view(1, 3, 1, 1) for values in (mean, std))
    return (x - means) / stds


def features_of(network: torch.nn.Module) -> Callable[[Any], Tensor]:
    """The function that computes the input of the last layer. A network without `penultimate` returns the
    features itself."""
    found: Callable[[Any], Tensor] = getattr(network, "penultimate", network)
    return found


def extract(
    images: NDArray[np.uint8],
    network: torch.nn.Module,
    to_input: ToInput,
    *,
    folder: Path,
    identity: str,
    device: str = "auto",
    batch: int = 500,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NDArray[np.float16]:
    """Features of images in memory, as float16; see `extract_pieces`."""
    pieces = extract_pieces(
        *(ImageArray(images), network, to_input),
        folder=folder,
        identity=identity,
        device=device,
        batch=batch,
        progress=progress,
    )
    return np.concatenate([np.load(piece, allow_pickle=False) for piece in pieces])


def extract_pieces(
    items: Items,
    network: torch.nn.Module,
    to_input: ToInput,
    *,
    folder: Path,
    identity: str,
    device: str = "auto",
    batch: int = 500,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """The files with the features of all items, as float16. Pieces are saved in `folder`, named by a hash of their
    items and `identity`. `identity` must name everything else that can change the features, so that pieces are reused
    only by the same extraction."""
    in_range(1, 100_000, batch=batch)
    torch_device = device_of(device)
    network = network.to(torch_device).eval()
    penultimate = features_of(network)
    folder = subfolder(folder.parent, folder.name)
    pieces, width = [], None
    for start in range(0, len(items), PIECE):
        stop = min(start + PIECE, len(items))
        name = hashlib.sha256(f"{identity}:{start}:{items.content(start, stop)}".encode()).hexdigest()
        path = folder / f"{name[:32]}.npy"
        if _width(path, stop - start) is None:
            batches = []
            for first in range(start, stop, batch):
                rows = items.read(first, min(first + batch, stop))
                batches.append(_features(penultimate, to_input(rows, torch_device), torch_device))
                if first + batch < stop:
                    progress(first + batch, len(items))
            with replacing(path) as file:
                np.save(file, np.concatenate(batches))
        found = _width(path, stop - start)
        if width not in (None, found):
            raise UserError(f"the backbone gives {width} features for one row and {found} for another")
        width = found
        pieces.append(path)
        progress(stop, len(items))
    return pieces


def _width(path: Path, rows: int) -> int | None:
    """The number of features in a piece; None if there is no piece of that many rows."""
    if path.is_symlink() or not path.is_file():
        return None
    try:
        piece = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):  # it is damaged
        return None
    return piece.shape[1] if piece.dtype == np.float16 and piece.ndim == 2 and len(piece) == rows else None


def remove_pieces(folder: Path) -> None:
    """Remove what extractions have saved. The folder stays if it holds other files."""
    with contextlib.suppress(OSError):  # files left behind cost disk space only
        for path in [] if folder.is_symlink() else list(folder.iterdir()):
            if PIECE_NAME.fullmatch(path.name):
                path.unlink()
        folder.rmdir()


def _features(penultimate: Callable[[Any], Tensor], x: Any, device: torch.device) -> NDArray[np.float16]:
    with torch.inference_mode():
        features = penultimate(x.to(device) if isinstance(x, Tensor) else x)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(x):
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UserError(f"the backbone gives {shape} for {len(x)} rows; it must give a tensor (rows, features)")
    half = features.half().cpu().numpy()
    if not np.isfinite(half).all():
        raise UserError("the backbone gives a feature that is nan or above 65,504, the largest number of float16")
    return half
