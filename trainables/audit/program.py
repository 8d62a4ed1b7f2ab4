"""Audit of an external training program, in any language, in one run: `fedsweep audit --program CMD`.

The program gets a feature file with canaries among its rows, and writes the weights of a linear model (or its releases)
into a folder. Every canary has a feature of its own, which no other row has. So the weights of that feature hold the
canary's clipped gradients and the noise, and nothing else. A fair coin decides whether a canary or its opposite is in
the data (with zero-out adjacency: the canary or an empty row). A canary's score is how far the weights of its feature
moved towards its label. With u the coins, the scores are a + b u + k N(0, 1) with unknown a, b and k, and mu = 2 b / k:
how well the scores agree with the coins bounds mu from below (`coin_bounds`).

The bound assumes Gaussian noise, equal in all rounds, and that every row is in every step. With secret samples the
scores vary more, which makes the bound smaller, and it is no longer proven.
"""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainables.audit.coin_bounds import CONFIDENCE, fdp_mu_bound, ratio_bound
from trainables.data.feature_file import READ_ERRORS
from trainables.data.features import FeatureSet
from trainables.errors import UserError, in_range
from trainables.files import open_plain
from trainables.privacy.gaussian import epsilon_of, mu_of
from trainables.privacy.plan import Adjacency

FEATURES, WEIGHTS, RELEASES = "features.npz", "weights.npy", "release-*.npy"
NORM = 100.0  # of a canary's feature: longer than any clip in use
GUESSED_FRACTION = 0.25


@dataclass(frozen=True)
class ProgramAudit:
    """The claim, and lower bounds on eps. Each holds with probability `CONFIDENCE`."""

    epsilon_claimed: float
    delta: float
    canaries: int
    guesses: int
    correct: int
    mu: float
    """Lower bound for Gaussian noise."""
    mu_estimate: float

    @property
    def epsilon(self) -> float:
        return epsilon_of(self.mu, self.delta)

    @property
    def fdp_epsilon(self) -> float:
        """Lower bound for any mu-GDP program."""
        return epsilon_of(fdp_mu_bound(self.correct, self.guesses, self.canaries), self.delta)

    @property
    def caught(self) -> bool:
        return self.mu > mu_of(self.epsilon_claimed, self.delta)


@dataclass(frozen=True)
class Planted:
    """Train rows with canaries. The last features belong to the canaries."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    coins: NDArray[np.int64]
    labels: NDArray[np.int64]
    features: int
    """Number of features of the original data."""
    classes: int

    @classmethod
    def plant(cls, data: FeatureSet, canaries: int, adjacency: Adjacency, seed: int) -> Planted:
        rng = np.random.default_rng(seed)
        rows = rng.choice(len(data.y_train), canaries, replace=False)
        labels, coins = rng.integers(0, data.classes, canaries), 2 * rng.integers(0, 2, canaries) - 1
        x = np.zeros((len(data.y_train), data.features + canaries), np.float32)
        x[:, : data.features], y = np.asarray(data.x_train), data.y_train.copy()
        x[rows], y[rows] = 0, labels
        signs = coins if adjacency == "replace-one" else (coins + 1) / 2
        x[rows, data.features + np.arange(canaries)] = NORM * signs
        return cls(x, y, coins, labels, data.features, data.classes)

    def scores(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """How far the weights of every canary's feature moved towards its label."""
        own = weights[self.features :]
        if own.shape[1] == 1:  # two classes, one column
            return own[:, 0] * (2 * self.labels - 1)
        towards = np.eye(self.classes)[self.labels] - 1 / self.classes
        return (own * towards).sum(1) / np.linalg.norm(towards, axis=1)


def audit_program(
    command: str,
    data: FeatureSet,
    epsilon: float,
    delta: float,
    *,
    adjacency: Adjacency,
    canaries: int,
    folder: Path,
    seed: int,
) -> ProgramAudit:
    """Run `command` once. It is called with the feature file and the output folder as its last two arguments."""
    in_range(0, float("inf"), "()", epsilon=epsilon)
    in_range(0, 1, "()", delta=delta)
    in_range(30, len(data.y_train), canaries=canaries)
    if not isinstance(data.x_train, np.ndarray):
        raise UserError(f"data {data.name} stays on disk, so canaries cannot replace its rows")
    planted = Planted.plant(data, canaries, adjacency, seed)
    out = folder / "out"
    out.mkdir(parents=True, exist_ok=True)
    empty = np.zeros((len(data.y_test), canaries), np.float32)
    np.savez(
        folder / FEATURES,
        x_train=planted.x,
        y_train=planted.y,
        x_test=np.concatenate([data.x_test, empty], axis=1),
        y_test=data.y_test,
    )
    try:
        done = subprocess.run(
            [*shlex.split(command), str(folder / FEATURES), str(out)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except (OSError, ValueError) as error:  # ValueError: a quotation that is not closed
        raise UserError(f"program = {command!r} cannot be started: {error}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"program = {command!r} ended with exit code {done.returncode}: {last}")
    scores = planted.scores(_read(out, planted))
    return _bounds(scores, planted.coins, epsilon, delta)


def _read(out: Path, planted: Planted) -> NDArray[np.float64]:
    """The weights, or minus the sum of the releases: (features, classes)."""
    files = [out / WEIGHTS] if (out / WEIGHTS).is_file() else sorted(out.glob(RELEASES))
    if not files:
        raise UserError(f"the program wrote neither {WEIGHTS} nor {RELEASES} into its output folder")
    try:
        arrays = [_array(file) for file in files]
        found = np.sum(arrays, axis=0) if files[0].name == WEIGHTS else -np.sum(arrays, axis=0)
    except (*READ_ERRORS, AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the program's {files[0].name} cannot be read as arrays of one shape: {reason}") from None
    width = planted.x.shape[1]
    table = found.reshape(len(found), -1) if found.ndim and found.size else np.zeros((1, 1))
    table = table if table.shape[0] in (width, width + 1) else table.T
    if table.shape[0] not in (width, width + 1) or table.shape[1] not in (1, planted.classes):
        raise UserError(
            f"the program's array has shape {found.shape}; a linear model of {width} features and {planted.classes} "
            "classes was expected"
        )
    if not np.isfinite(table).all():
        raise UserError("the program's array has values that are not finite")
    return table[:width]


def _array(file: Path) -> NDArray[np.float64]:
    with open_plain(file) as content:
        return np.load(content, allow_pickle=False).astype(np.float64)


def _bounds(scores: NDArray[np.float64], coins: NDArray[np.int64], epsilon: float, delta: float) -> ProgramAudit:
    canaries, guesses = len(coins), max(10, round(GUESSED_FRACTION * len(coins)))
    centred = scores - np.median(scores)
    largest = np.argsort(-np.abs(centred), kind="stable")[:guesses]
    correct = int((np.sign(centred) == coins)[largest].sum())
    least, estimate = ratio_bound(scores, coins.astype(np.float64))
    return ProgramAudit(epsilon, delta, canaries, guesses, correct, max(0.0, 2 * least), 2 * estimate)


__all__ = ["CONFIDENCE", "ProgramAudit", "audit_program"]
