"""Built-in data sets, generated from a fixed seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainables.errors import UserError, in_range

FORMS = ("synthetic-frozen[:TRAIN,TEST,FEATURES,CLASSES]", "synthetic:ALPHA,BETA[,CLIENTS]")

Arrays = dict[str, NDArray]


def generate(name: str) -> tuple[str, Arrays] | None:
    """The fingerprint and the arrays of a built-in set; None for any other name."""
    kind, _, text = name.partition(":")
    if kind == "synthetic-frozen":
        sizes = _numbers(name, text) or [50_000, 10_000, 64, 10]
        if len(sizes) != 4 or any(not float(size).is_integer() for size in sizes):
            raise UserError(f"data {name!r}: expected four whole numbers TRAIN,TEST,FEATURES,CLASSES")
        train, test, features, classes = (int(size) for size in sizes)
        in_range(2, 1000, **{f"data {name!r}: CLASSES": classes})
        in_range(1, 100_000, **{f"data {name!r}: FEATURES": features})
        in_range(classes, 10**8, **{f"data {name!r}: TRAIN": train, f"data {name!r}: TEST": test})
        return f"synthetic-frozen:1:{train},{test},{features},{classes}", frozen(train, test, features, classes)
    if kind == "synthetic":
        numbers = _numbers(name, text)
        if len(numbers) not in (2, 3) or any(not number.is_integer() for number in numbers[2:]):
            raise UserError(f"data {name!r}: expected ALPHA,BETA[,CLIENTS]")
        alpha, beta, clients = numbers[0], numbers[1], int(numbers[2]) if len(numbers) == 3 else 30
        in_range(0, 100, **{f"data {name!r}: ALPHA": alpha, f"data {name!r}: BETA": beta})
        in_range(1, 10**6, **{f"data {name!r}: CLIENTS": clients})
        return f"synthetic:1:{alpha:g},{beta:g},{clients}", heterogeneous(alpha, beta, clients)
    return None


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise UserError(f"data {name!r}: {text!r} is not a list of numbers") from None


def frozen(train: int, test: int, features: int, classes: int) -> Arrays:
    """Like the output of a frozen backbone: non-negative, norm about 16, ill-conditioned, overlapping classes. The best
    linear probe on the default sizes reaches about 72%. float16, like real features."""
    rng = _generator("synthetic-frozen")
    rows = train + test
    labels = np.concatenate([rng.permutation(np.arange(n) % classes) for n in (train, test)])
    spectrum = np.arange(1, features + 1) ** -0.6
    means = 0.345 * rng.standard_normal((classes, features))
    latent = (means[labels] + rng.standard_normal((rows, features))) * spectrum
    mixed = latent @ (rng.standard_normal((features, features)) / np.sqrt(features))
    x = np.maximum(mixed + 1.2 * mixed.std(), 0)
    x = (x * (16 / np.linalg.norm(x, axis=1).mean())).astype(np.float16)
    return {"x_train": x[:train], "y_train": labels[:train], "x_test": x[train:], "y_test": labels[train:]}


def heterogeneous(alpha: float, beta: float, clients: int) -> Arrays:
    """synthetic(alpha, beta) of the FedProx paper: 60 features, 10 classes. alpha controls how much the clients' models
    differ, beta how much their inputs differ. A tenth of each client's rows goes to the test set."""
    rng = _generator(f"synthetic:{alpha:g},{beta:g}")
    features, classes = 60, 10
    deviation = np.arange(1, features + 1) ** -0.6  # covariance j^-1.2
    parts: dict[str, list[NDArray]] = {key: [] for key in ("x_train", "y_train", "client_train", "x_test", "y_test")}
    for client in range(clients):
        size = min(int(rng.lognormal(4, 2)), 10_000) + 50
        model_mean, input_mean = rng.normal(0, np.sqrt(alpha)), rng.normal(0, np.sqrt(beta))
        W = rng.normal(model_mean, 1, (features, classes))
        b = rng.normal(model_mean, 1, classes)
        centre = rng.normal(input_mean, 1, features)
        x = (centre + rng.standard_normal((size, features)) * deviation).astype(np.float32)
        y = np.argmax(x @ W + b, axis=1)
        cut = size // 10
        for key, rows in zip(parts, (x[cut:], y[cut:], np.full(size - cut, client), x[:cut], y[:cut]), strict=True):
            parts[key].append(rows)
    return {key: np.concatenate(value) for key, value in parts.items()}


def _generator(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=int.from_bytes(name.encode()[-16:], "little")))
