"""Trains a backbone from scratch: SGD with momentum, a cosine schedule, shifted and mirrored images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from trainables.data import backbones
from trainables.data.backbones.extraction import device_of, normalised
from trainables.errors import UserError, in_range, one_of
from trainables.files import replacing

CIFAR100_MEAN, CIFAR100_STD = (0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)
SHIFT = 4  # pixels in every direction


@dataclass(frozen=True)
class Schedule:
    epochs: int = 200
    batch: int = 256
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    seed: int = 42

    def __post_init__(self) -> None:
        in_range(1, 10_000, epochs=self.epochs)
        in_range(2, 100_000, batch=self.batch)
        in_range(0, 100, "(]", learning_rate=self.learning_rate)
        in_range(0, 2**63 - 1, seed=self.seed)


@dataclass(frozen=True)
class Epoch:
    """Progress of the training."""

    number: int
    loss: float
    accuracy: float
    """On the test images, in percent."""


def pretrain(
    name: str,
    arrays: dict[str, NDArray],
    target: Path,
    schedule: Schedule,
    device: str = "auto",
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> Epoch:
    """Train on `x_train`, evaluate on `x_test` and write a plain state dict. After every epoch a checkpoint is
    written next to the target, from which the same call resumes."""
    one_of(backbones.BACKBONES, backbone=name)
    torch_device = device_of(device)
    torch.manual_seed(schedule.seed)
    classes = int(arrays["y_train"].max()) + 1
    network = backbones.BACKBONES[name](classes).to(torch_device)
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=schedule.learning_rate,
        momentum=schedule.momentum,
        weight_decay=schedule.weight_decay,
        nesterov=True,
    )
    steps = schedule.epochs * -(-len(arrays["y_train"]) // schedule.batch)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    checkpoint = target.with_name(f"{target.name}.training")
    state: dict[str, Any] = {"network": network, "optimizer": optimizer, "rate": rate}
    identity = f"{name}:{schedule}"
    start = _restore(checkpoint, state, identity, torch_device)
    x, y = (torch.from_numpy(arrays[key]).to(torch_device) for key in ("x_train", "y_train"))
    epoch = Epoch(start, float("nan"), float("nan"))
    for number in range(start + 1, schedule.epochs + 1):
        loss = _epoch(network, optimizer, rate, x, y.long(), schedule, number)
        epoch = Epoch(number, loss, accuracy(network, arrays["x_test"], arrays["y_test"], torch_device))
        _save({"for": identity, "epoch": number, **{k: v.state_dict() for k, v in state.items()}}, checkpoint)
        on_epoch(epoch)
    _save({key: value.cpu() for key, value in network.state_dict().items()}, target)
    checkpoint.unlink(missing_ok=True)
    return epoch


def _epoch(
    network: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rate: torch.optim.lr_scheduler.LRScheduler,
    x: Tensor,
    y: Tensor,
    schedule: Schedule,
    number: int,
) -> float:
    """Train for one epoch; returns the mean loss. The order of the images, and how they are shifted and mirrored,
    depend only on the seed and the epoch."""
    network.train()
    generator = torch.Generator().manual_seed(schedule.seed * 1_000_003 + number)
    order = torch.randperm(len(y), generator=generator)
    total = 0.0
    for rows in order.split(schedule.batch):
        if len(rows) < 2:  # batch normalisation needs two rows
            continue
        batch = _augmented(normalised(x[rows.to(x.device)], CIFAR100_MEAN, CIFAR100_STD), generator)
        loss = functional.cross_entropy(network(batch), y[rows.to(y.device)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        total += float(loss.detach()) * len(rows)
    return total / len(y)


def _augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Images shifted by up to `SHIFT` pixels; each is mirrored with probability 1/2."""
    count, _, height, width = x.shape
    padded = functional.pad(x, [SHIFT] * 4)
    down, right = torch.randint(0, 2 * SHIFT + 1, (2, count, 1), generator=generator).to(x.device)
    rows = down + torch.arange(height, device=x.device)
    columns = right + torch.arange(width, device=x.device)
    shifted = padded[torch.arange(count, device=x.device)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    shifted = shifted.permute(0, 3, 1, 2)
    mirrored = torch.rand(count, generator=generator).to(x.device) < 0.5
    return torch.where(mirrored.view(-1, 1, 1, 1), shifted.flip(3), shifted)


@torch.inference_mode()
def accuracy(network: torch.nn.Module, images: NDArray[np.uint8], labels: NDArray, torch_device: torch.device) -> float:
    """In percent."""
    network.eval()
    correct = 0
    for start in range(0, len(labels), 1000):
        rows = torch.from_numpy(np.ascontiguousarray(images[start : start + 1000]))
        predicted = network(normalised(rows, CIFAR100_MEAN, CIFAR100_STD).to(torch_device)).argmax(1)
        correct += int((predicted.cpu().numpy() == labels[start : start + 1000]).sum())
    return 100 * correct / len(labels)


def _restore(checkpoint: Path, state: dict[str, Any], identity: str, torch_device: torch.device) -> int:
    """Load the checkpoint, if there is one. Returns the number of finished epochs."""
    if not checkpoint.is_file():
        return 0
    saved = torch.load(checkpoint, map_location=torch_device, weights_only=True)
    if saved["for"] != identity:
        raise UserError(f"{checkpoint} belongs to a training with other settings; delete it to start again")
    for name, part in state.items():
        part.load_state_dict(saved[name])
    return saved["epoch"]


def _save(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        torch.save(content, file)
