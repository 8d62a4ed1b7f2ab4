"""The round that the comparison times, in plain torch: the client computation for frameworks that leave it to the user.

20 clients of 2,500 rows, 64 features, 10 classes. Every per-example gradient of a linear head is clipped, and noise is
added to the sum. Gradient norms use the closed form, so that no framework has to materialise per-example gradients.
"""

import functools
import sys

import numpy as np
import torch

CLIENTS, ROWS, FEATURES, CLASSES = 20, 2500, 64, 10
CLIP, LEARNING_RATE, ROUNDS = 10.0, 0.5, 21


def problem() -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of all clients, (client, row, ...); the same for every framework."""
    rng = np.random.default_rng(7)
    centres = rng.normal(size=(CLASSES, FEATURES))
    labels = rng.integers(0, CLASSES, (CLIENTS, ROWS))
    features = centres[labels] + 2 * rng.normal(size=(CLIENTS, ROWS, FEATURES))
    return features.astype(np.float32), labels


def start() -> tuple[torch.Tensor, float]:
    """Initial weights and standard deviation of the noise on a client's sum, as in fedsweep; read from the file given
    on the command line."""
    arrays = np.load(sys.argv[1])
    return torch.from_numpy(arrays["theta"]), float(arrays["noise"])


def with_constant(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([x, np.ones((len(x), 1), dtype=np.float32)], axis=1))


@functools.cache
def rows_of(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cached per worker process, so that only the first round loads data."""
    x, y = problem()
    return with_constant(x[client]), torch.from_numpy(y[client])


def private_step(theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """A client's weights after one noisy step."""
    residual = torch.softmax(x @ theta, 1)
    residual[torch.arange(len(y)), y] -= 1
    norms = x.norm(dim=1) * residual.norm(dim=1)
    gradient = x.T @ (residual * (CLIP / norms).clamp(max=1).unsqueeze(1))
    return theta - LEARNING_RATE * (gradient + noise) / len(y)


def accuracy(theta: torch.Tensor) -> float:
    """In percent, on the rows of the first client."""
    x, y = rows_of(0)
    return 100 * ((x @ theta).argmax(1) == y).float().mean().item()
