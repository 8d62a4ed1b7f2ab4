"""Images through a frozen network, piece by piece; what is done is kept, so that an interrupted extraction goes on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.errors import UserError, in_range, one_of

PIECE = 2_000  # images between two savings

Extractor = Callable[[Tensor], Tensor]


def device_of(name: str) -> torch.device:
    one_of(("auto", "cpu", "cuda"), device=name)
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda', but this machine has no GPU that torch can use")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def normalised(images: NDArray[np.uint8], mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Rows x height x width x channels of bytes as a batch for a network; what is grey is repeated over channels."""
    x = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float() / 255
    if x.shape[1] == 1:
        x = x.expand(-1, 3, -1, -1)
    return (x - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)


def extract(
    images: NDArray[np.uint8],
    network: torch.nn.Module,
    prepare: Callable[[NDArray[np.uint8]], Tensor],
    *,
    kept: Path,
    identity: str,
    device: str = "auto",
    batch: int = 500,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NDArray[np.float16]:
    """Features of all images as float16. Pieces lie in `kept` under names that hold `identity`, which names everything
    that can change them: pieces of another extraction are never taken for ours."""
    in_range(1, 100_000, batch=batch)
    where = device_of(device)
    network = network.to(where).eval()
    penultimate = getattr(network, "penultimate", network)  # timm's come without their last layer
    kept.mkdir(parents=True, exist_ok=True)
    pieces = []
    for start in range(0, len(images), PIECE):
        rows = images[start : start + PIECE]
        name = hashlib.sha256(f"{identity}:{start}:{hashlib.sha256(rows.tobytes()).hexdigest()}".encode()).hexdigest()
        path = kept / f"{name[:32]}.npy"
        if not path.is_file():
            temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
            with temporary.open("wb") as file:
                np.save(file, _features(rows, prepare, penultimate, where, batch))
            os.replace(temporary, path)
        pieces.append(np.load(path, allow_pickle=False))
        progress(start + len(rows), len(images))
    return np.concatenate(pieces)


@torch.inference_mode()
def _features(
    rows: NDArray[np.uint8],
    prepare: Callable[[NDArray[np.uint8]], Tensor],
    penultimate: Extractor,
    where: torch.device,
    batch: int,
) -> NDArray[np.float16]:
    found = [
        penultimate(prepare(rows[start : start + batch]).to(where)).half().cpu() for start in range(0, len(rows), batch)
    ]
    return torch.cat(found).numpy()
