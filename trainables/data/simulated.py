"""Simulated estimation problems: data drawn from a generalised linear model with known weights, the truth.

Covariates are independent and uniform on [-1, 1]. With the constant, ||x||^2 <= DIMENSION + 1, so the gradients of the
logistic and the multinomial model are bounded. The truth depends on the task and the dimension alone, so all
seeds estimate the same parameter. A client's rows depend on its number and the seed, not on the number of other
clients.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainables.errors import UserError, in_range, one_of

FORM = "simulated:TASK,CLIENTS,MEAN_SIZE,SIZES,DIMENSION[,SEED]"
TASKS = ("logistic", "multinomial", "poisson")
SIZES = ("equal", "uniform", "lognormal")
CLASSES = 3  # of the multinomial task
TEST_ROWS = 2000
NORM = 1.5  # of the slopes: linear predictors have a standard deviation of about 0.9
INTERCEPT = 0.5
SPREAD = 0.5  # standard deviation of log(size) for lognormal sizes


@dataclass(frozen=True)
class Simulation:
    task: str
    clients: int
    mean_size: int
    sizes: str
    dimension: int
    seed: int

    @property
    def fingerprint(self) -> str:
        return f"simulated:1:{self.task},{self.clients},{self.mean_size},{self.sizes},{self.dimension},{self.seed}"

    @property
    def truth(self) -> NDArray[np.float64]:
        """(DIMENSION + 1, columns), the intercept last. The slopes of the first column run from positive to negative;
        every further column rotates those of the column before it by one place."""
        slopes = np.linspace(1, -1, self.dimension) if self.dimension > 1 else np.ones(1)
        slopes *= NORM / np.linalg.norm(slopes)
        columns = CLASSES - 1 if self.task == "multinomial" else 1
        return np.vstack([np.stack([np.roll(slopes, j) for j in range(columns)], axis=1), np.full(columns, INTERCEPT)])

    def draw(self) -> dict[str, NDArray]:
        parts = [self._client(client) for client in range(self.clients)]
        x_test, y_test = self._rows(self._generator("test"), TEST_ROWS)
        return {
            "x_train": np.concatenate([x for x, _ in parts]),
            "y_train": np.concatenate([y for _, y in parts]),
            "client_train": np.repeat(np.arange(self.clients), [len(y) for _, y in parts]),
            "x_test": x_test,
            "y_test": y_test,
        }

    def _client(self, client: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        rng, mean = self._generator(f"client {client}"), self.mean_size
        size = mean
        if self.sizes == "uniform":
            size = int(rng.integers(mean // 2, mean + mean // 2, endpoint=True))
        elif self.sizes == "lognormal":
            drawn = rng.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD)
            size = round(min(max(drawn, mean / 4), 4 * mean))
        return self._rows(rng, size)

    def _rows(self, rng: np.random.Generator, rows: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        x = rng.uniform(-1, 1, (rows, self.dimension)).astype(np.float32)
        eta = x @ self.truth[:-1] + self.truth[-1]
        if self.task == "poisson":
            return x, rng.poisson(np.exp(eta[:, 0]))
        weights = np.exp(np.hstack([np.zeros((rows, 1)), eta]))
        below = np.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)
        return x, (rng.random((rows, 1)) > below[:, :-1]).sum(axis=1)

    def _generator(self, part: str) -> np.random.Generator:
        name = f"{self.task},{self.mean_size},{self.sizes},{self.dimension},{self.seed},{part}"
        digest = hashlib.blake2b(name.encode(), digest_size=16, person=b"fedsweep-sim").digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def parse(name: str, seed: int) -> Simulation | None:
    """The simulation that a name describes, None for any other name. `seed` is used if the name has no SEED."""
    kind, _, text = name.partition(":")
    if kind != "simulated":
        return None
    parts = text.split(",")
    if len(parts) not in (5, 6):
        raise UserError(f"data {name!r}: expected {FORM}")
    task, clients, mean_size, sizes, dimension, *given_seed = parts
    one_of(TASKS, **{f"data {name!r}: TASK": task})
    one_of(SIZES, **{f"data {name!r}: SIZES": sizes})
    numbers = {"CLIENTS": clients, "MEAN_SIZE": mean_size, "DIMENSION": dimension, "SEED": (*given_seed, str(seed))[0]}
    for field, value in numbers.items():
        if not value.isdecimal():
            raise UserError(f"data {name!r}: {field} = {value!r} is not a whole number")
    limits = {"CLIENTS": (1, 10**6), "MEAN_SIZE": (10, 10**7), "DIMENSION": (1, 1000), "SEED": (0, 2**63 - 1)}
    for field, (low, high) in limits.items():
        in_range(low, high, **{f"data {name!r}: {field}": int(numbers[field])})
    in_range(10, 10**8, **{f"data {name!r}: CLIENTS x MEAN_SIZE": int(clients) * int(mean_size)})
    return Simulation(task, int(clients), int(mean_size), sizes, int(dimension), int(numbers["SEED"]))


def drawn_by_seed(name: str) -> bool:
    """Whether this is a simulation without SEED in its name, so that every seed of a study draws its own data."""
    return name.startswith("simulated:") and name.count(",") == 4
