"""Extracts features with a frozen network. Finished pieces are saved, so an interrupted extraction resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.errors import UserError, in_range, one_of
from trainables.files import replacing

PIECE = 2_000  # images per saved file


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


def extract(
    images: NDArray[np.uint8],
    network: torch.nn.Module,
    to_input: Callable[[NDArray[np.uint8]], Tensor],
    *,
    folder: Path,
    identity: str,
    device: str = "auto",
    batch: int = 500,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NDArray[np.float16]:
    """Features of all images as float16. Pieces are saved in `folder`, named by a hash of their images and `identity`.
    `identity` must name everything else that can change them, so that pieces are reused only by the same extraction."""
    in_range(1, 100_000, batch=batch)
    torch_device = device_of(device)
    network = network.to(torch_device).eval()
    penultimate = getattr(network, "penultimate", network)  # timm models come without their last layer
    folder.mkdir(parents=True, exist_ok=True)
    pieces = []
    for start in range(0, len(images), PIECE):
        rows = images[start : start + PIECE]
        name = hashlib.sha256(f"{identity}:{start}:{hashlib.sha256(rows.tobytes()).hexdigest()}".encode()).hexdigest()
        path = folder / f"{name[:32]}.npy"
        if not path.is_file():
            with replacing(path) as file, torch.inference_mode():
                batches = (to_input(rows[i : i + batch]).to(torch_device) for i in range(0, len(rows), batch))
                np.save(file, torch.cat([penultimate(x).half().cpu() for x in batches]).numpy())
        pieces.append(np.load(path, allow_pickle=False))
        progress(start + len(rows), len(images))
    return np.concatenate(pieces)
