"""Canaries of a one-run audit: planted records, or at user level planted clients, whose presence a coin decides."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.errors import UserError
from trainables.federation.pack import ClientWork
from trainables.federation.problem import Problem, ProblemData
from trainables.federation.trial_spec import TrialSpec
from trainables.models import at_cut, centring
from trainables.models.centres import Centres
from trainables.models.shard import Shard

# norm of a canary's features, in units of the clip; its gradient is clipped unless the canary is memorised
LENGTH = 4.0
USER_LENGTH = 100.0  # the same for the rows of a user: even small steps make the update longer than the clip
MAX_FRACTION = 0.5  # of a client's rows that canaries may replace
MAX_DEFAULT_CANARIES = 1000


@dataclass(frozen=True)
class Canaries:
    """Records that replace some rows of a problem."""

    problem: Problem
    trial: TrialSpec
    rows: NDArray[np.int64]
    """The train rows that they replace."""
    clients: NDArray[np.int64]
    """The client of each canary."""
    coins: NDArray[np.int64]
    """1: the canary is used; -1: its opposite, or no record."""
    x: NDArray[np.float32]
    y: NDArray[np.int64]
    which: NDArray[np.int64]
    """The index of the canary in each of `rows`."""

    @classmethod
    def plant(cls, problem: Problem, trial: TrialSpec, count: int, seed: int) -> Canaries:
        """Draw canaries: records, or at user level clients."""
        if trial.privacy.level == "user":
            return UserCanaries.plant_users(problem, trial, count, seed)
        rng = np.random.default_rng(seed)
        available = [rng.permutation(rows)[: int(MAX_FRACTION * len(rows))] for rows in problem.partition.rows]
        clients = np.repeat(np.arange(len(available)), [len(rows) for rows in available])
        chosen = rng.permutation(len(clients))[:count]
        x, labels, coins = _draw(rng, problem, count, LENGTH * trial.privacy.clip)
        rows = np.concatenate(available)[chosen]
        return cls(problem, trial, rows, clients[chosen], coins, x, labels, np.arange(count))

    @property
    def replaced(self) -> bool:
        """Whether an absent canary is replaced by its opposite. If not, it is removed."""
        return self.trial.privacy.adjacency == "replace-one"

    def data(self, coins: NDArray[np.int64]) -> ProblemData:
        """The clients' data for these coins. The public sizes |D_i| do not depend on them."""
        shipped = ProblemData.of(self.problem)
        x, y = shipped.x.copy(), shipped.y.copy()
        signs = coins if self.replaced else np.ones_like(coins)
        x[self.rows], y[self.rows] = (signs[:, None] * self.x)[self.which], self.y[self.which]
        absent = self.rows[coins[self.which] < 0]
        return replace(shipped, x=x, y=y, rows=shipped.rows if self.replaced else self._without(absent))

    def _without(self, absent: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        return tuple(rows[~np.isin(rows, absent)] for rows in self.problem.partition.rows)

    def gradients(self, work: ClientWork, theta: torch.Tensor) -> NDArray[np.float64]:
        """For every canary and lane, half the difference that its coin makes to its client's sum of gradients."""
        present = self._gradients(1, work, theta)
        return (present - self._gradients(-1, work, theta)) / 2 if self.replaced else present / 2

    def _gradients(self, sign: int, work: ClientWork, theta: torch.Tensor) -> NDArray[np.float64]:
        x, clip, model = sign * self.x, torch.from_numpy(work.clip), self.problem.model
        x, model = at_cut(model, x), work.data.model
        shard = Shard.build([(x[i : i + 1], self.y[i : i + 1]) for i in range(len(self.y))])
        if work.centre is not None:
            shard = centring.with_centres(model, shard, Centres.of(work.centre, "cpu", work.factor))
        options = {"automatic": True} if work.automatic else {}
        gradients, _ = centring.clipped_gradient_sum(model, shard, theta, clip, **options)
        return gradients.numpy()

    def effects(
        self,
        work: ClientWork,
        client: int,
        gradients: NDArray[np.float64],
        above: NDArray[np.float64],
        below: NDArray[np.float64],
    ) -> tuple[NDArray[np.float64], float]:
        """What the coins of a client's canaries change in its release, and the factor of its noise. `above` and `below`
        are its releases without noise if all coins are 1, and if all are -1."""
        # how the release scales the sum of gradients: 1 / |D_i|, times the step size if it is a step
        direction = gradients.sum(0)
        scale = float((above - below) @ direction) / max(2 * float(direction @ direction), 1e-300)
        return scale * gradients, scale


@dataclass(frozen=True)
class UserCanaries(Canaries):
    """Clients all of whose rows are one planted record, or its opposite (with zero-out: clients without rows)."""

    @classmethod
    def plant_users(cls, problem: Problem, trial: TrialSpec, count: int, seed: int) -> UserCanaries:
        rng = np.random.default_rng(seed)
        clients = np.sort(rng.permutation(len(problem.partition.rows))[:count])
        x, labels, coins = _draw(rng, problem, count, USER_LENGTH * trial.privacy.clip)
        of_client = [problem.partition.rows[client] for client in clients]
        which = np.repeat(np.arange(count), [len(rows) for rows in of_client])
        return cls(problem, trial, np.concatenate(of_client), clients, coins, x, labels, which)

    def gradients(self, work: ClientWork, theta: torch.Tensor) -> NDArray[np.float64]:
        return np.zeros((len(self.coins), len(work.lanes), 0))

    def effects(
        self,
        work: ClientWork,
        client: int,
        gradients: NDArray[np.float64],
        above: NDArray[np.float64],
        below: NDArray[np.float64],
    ) -> tuple[NDArray[np.float64], float]:
        """The coin of a user decides between the two releases."""
        if not self.replaced and len(gradients) and below.any():
            raise UserError(
                f"adjacency = 'zero-out': a user without rows still contributes to {self.trial.method}; "
                f"use `fedsweep audit {self.trial.method}`"
            )
        sizes = work.data.sizes
        weight = sizes[client] * len(sizes) / sum(sizes) if work.aggregate == "size" else 1.0
        return np.repeat([(above - below) / 2], len(gradients), axis=0), weight / work.secret_participation


def _draw(
    rng: np.random.Generator, problem: Problem, count: int, length: float
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """Features of random directions, labels and coins."""
    directions = rng.standard_normal((count, problem.data.features))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    labels = rng.integers(0, problem.data.classes, count)
    return (length * directions).astype(np.float32), labels, 2 * rng.integers(0, 2, count) - 1
