"""An Opacus script to be audited: full-batch DP-SGD of a linear model (`pip install opacus`).

    fedsweep audit --program "python examples/audit/opacus_program.py" --epsilon 2 --adjacency zero-out

Opacus accounts for records that are added or removed: `--adjacency zero-out`. `--fault` plants a mistake that the audit
catches."""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

CLIP, ROUNDS, LEARNING_RATE = 1.0, 20, 0.5
MU = 0.50162  # of eps = 2 at delta = 1e-5
FAULTS = ("none", "divisor", "steps", "clip-after-mean")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("features", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    with np.load(given.features) as data:
        x, y = torch.from_numpy(data["x_train"]), torch.from_numpy(data["y_train"])
    model = torch.nn.Linear(x.shape[1], int(y.max()) + 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    multiplier = math.sqrt(ROUNDS // 8 if given.fault == "steps" else ROUNDS) / MU
    if given.fault == "divisor":  # the noise is divided by the batch size twice
        multiplier /= len(y)
    train = clip_after_mean if given.fault == "clip-after-mean" else with_opacus
    train(model, x, y, multiplier)
    np.save(given.out / "weights.npy", model.weight.detach().numpy())


def with_opacus(model: torch.nn.Linear, x: torch.Tensor, y: torch.Tensor, multiplier: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(y)),
        noise_multiplier=multiplier,
        max_grad_norm=CLIP,
        poisson_sampling=False,
    )
    for _ in range(ROUNDS):
        for rows, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(private(rows), labels).backward()
            optimizer.step()


def clip_after_mean(model: torch.nn.Linear, x: torch.Tensor, y: torch.Tensor, multiplier: float) -> None:
    """The mistake: the mean gradient is clipped, not every record's."""
    for _ in range(ROUNDS):
        (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), y), [model.weight])
        gradient = gradient * min(1.0, CLIP / float(gradient.norm()))
        noise = multiplier * CLIP / len(y) * torch.randn_like(gradient)
        with torch.no_grad():
            model.weight -= LEARNING_RATE * (gradient + noise)


if __name__ == "__main__":
    main()
