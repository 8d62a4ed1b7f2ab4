"""A private training program in NumPy, to be audited: full-batch DP-SGD of a softmax regression.

    fedsweep audit --program "python examples/audit/numpy_program.py" --epsilon 2

`--fault` plants a mistake that the audit catches."""

import argparse
from pathlib import Path

import numpy as np

CLIP, ROUNDS, LEARNING_RATE = 1.0, 20, 0.5
MU = 0.50162  # of eps = 2 at delta = 1e-5
FAULTS = ("none", "divisor", "steps", "clip-after-mean")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("features", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    with np.load(given.features) as data:
        x, y = data["x_train"].astype(np.float64), data["y_train"]
    weights = train(x, y, given.fault, np.random.default_rng(given.seed))
    np.save(given.out / "weights.npy", weights)


def train(x: np.ndarray, y: np.ndarray, fault: str, rng: np.random.Generator) -> np.ndarray:
    """Replace-one adjacency: one record moves the sum of clipped gradients by 2 CLIP."""
    counted = ROUNDS // 8 if fault == "steps" else ROUNDS
    std = 2 * CLIP * np.sqrt(counted) / MU
    weights, labels = np.zeros((x.shape[1], y.max() + 1)), np.eye(y.max() + 1)[y]
    norms = np.linalg.norm(x, axis=1)
    for _ in range(ROUNDS):
        logits = x @ weights
        p = np.exp(logits - logits.max(1, keepdims=True))
        errors = p / p.sum(1, keepdims=True) - labels
        lengths = np.maximum(norms * np.linalg.norm(errors, axis=1), 1e-12)
        if fault == "clip-after-mean":  # one record can turn the whole mean
            mean = x.T @ errors / len(y)
            mean *= min(1.0, CLIP / np.linalg.norm(mean))
        else:
            mean = x.T @ (errors * np.minimum(1, CLIP / lengths)[:, None]) / len(y)
        divisor = len(y) ** 2 if fault == "divisor" else len(y)  # the noise is divided twice
        weights -= LEARNING_RATE * (mean + std / divisor * rng.standard_normal(weights.shape))
    return weights


if __name__ == "__main__":
    main()
