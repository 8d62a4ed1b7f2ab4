"""Data sets as users bring them: text labels and ids, small clients, missing values."""

import csv
from pathlib import Path

import numpy as np

SPECIES = ("adelie", "chinstrap", "gentoo")


def small_users(users: int = 187, single: int = 20, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays of a feature file in which some users hold one row and the others two to nine, with text ids."""
    rng = np.random.default_rng(seed)
    sizes = np.concatenate([np.ones(single, dtype=int), rng.integers(2, 10, users - single)])
    ids = np.repeat([f"user-{number:03d}" for number in rng.permutation(users)], sizes)
    y = rng.integers(0, 3, len(ids) + 200)
    x = (rng.normal(size=(len(y), 5)) + y[:, None]).astype(np.float32)
    labels = np.array(SPECIES)[y]
    train = len(ids)
    return {
        "x_train": x[:train],
        "y_train": labels[:train],
        "client_train": ids,
        "x_test": x[train:],
        "y_test": labels[train:],
    }


def write_table(path: Path, rows: int = 300, *, missing: bool = True, seed: int = 0) -> Path:
    """A CSV of visits: text ids and labels, a category, numbers, some of them missing."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["patient", "age", "sex", "marker", "site", "outcome"])
        for number in range(rows):
            ill = rng.random() < 0.4
            age = round(float(np.clip(rng.normal(60 if ill else 45, 12), 18, 95)))
            marker = "" if missing and number % 17 == 3 else f"{rng.normal(3.0 if ill else 1.0, 1.0):.3f}"
            site = f"clinic {'ABCDE'[rng.integers(5)]}"
            out.writerow([f"p{number:04d}", age, rng.choice(["f", "m"]), marker, site, "ill" if ill else "healthy"])
    return path
