"""Pairs of neighbouring data sets that a method is tried on: records of every class that are as visible as the
clip allows, a client whose other rows contribute nothing, and ordinary rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainables.data import features
from trainables.data import partition as partitions
from trainables.errors import UserError
from trainables.federation.problem import Problem, ProblemData
from trainables.federation.trial_spec import DataSpec, ProblemSpec
from trainables.methods.base import Method
from trainables.privacy.plan import Adjacency, Level

DATA = "synthetic-frozen:66,20,24,4"
CLIENTS = 3
LONG = 60.0  # norm of the features of a record that is always clipped


@dataclass(frozen=True)
class Neighbours:
    """Two data sets that differ in one record, or in half or all of the rows of one client."""

    name: str
    client: int
    data: ProblemData
    other: ProblemData | None
    """None: in the second data set, the client contributes nothing (user level)."""
    limited: bool = True
    """Whether the account limits the shift. It does not if many rows of a client change at record level. Such a pair
    tests that a shift exists, whichever rows a method uses."""


def problem_for(method: Method, data: str = DATA, clients: int = CLIENTS) -> Problem:
    """A small problem with the first model that the method accepts."""
    loaded = features.load(data)
    for model in ("softmax", "multinomial", "mlp:4"):
        spec = ProblemSpec(
            data=DataSpec(fingerprint=loaded.fingerprint),
            partition=partitions.parse("dirichlet:5", clients=clients, seed=42),
            train_on="all",
            evaluate_on="test",
            model=model,
        )
        problem = Problem.prepare(loaded, spec)
        if method.accepts(problem.model):
            return problem
    raise UserError(f"{method.name} accepts none of the packaged models")


def pairs(problem: Problem, level: Level, adjacency: Adjacency) -> Iterator[Neighbours]:
    """The first pair is the most visible one. The last pair has a client without features, except for users with
    zero-out."""
    make = _Pairs(problem, np.random.default_rng(7))
    smallest, *others, largest = np.argsort(problem.partition.sizes, kind="stable").tolist()
    clients = smallest, largest, *others
    if level == "record":
        yield from make.records(clients, adjacency)
    else:
        yield from make.users(clients, adjacency)


class _Pairs:
    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        self.data, self.classes = ProblemData.of(problem), problem.data.classes
        direction = rng.standard_normal(problem.data.features)
        self.long = (LONG * direction / np.linalg.norm(direction)).astype(np.float32)
        self.rng = rng

    def records(self, clients: tuple[int, ...], adjacency: Adjacency) -> Iterator[Neighbours]:
        """Records of every class, and of every client."""
        first, second, *_ = clients
        zero = np.zeros_like(self.long)
        for label in range(self.classes):
            client = clients[label % len(clients)]
            base = self._with_last(self.data, client, self.long, label)
            if adjacency == "replace-one":
                other = self._with_last(self.data, client, -self.long, label)
            else:
                other = self._without_last(base, client)
            yield Neighbours(f"a long record of class {label}", client, base, other)
        rows = self.data.rows[first]
        if adjacency == "zero-out":
            fewer = replace(self.data, rows=self._rows(self.data, first, rows[: len(rows) // 2]))
            yield Neighbours("half of a client's rows", first, self.data, fewer, limited=False)
            yield Neighbours("an ordinary record", first, self.data, self._without_last(self.data, first))
            quiet = self._quiet(first)
            base = self._with_last(quiet, first, zero, 0)
            yield Neighbours("a record of a client without features", first, base, self._without_last(base, first))
            return
        turned = self._with_rows(self.data, first, -self.data.x[rows], (self.data.y[rows] + 1) % self.classes)
        yield Neighbours("all rows of a client", first, self.data, turned, limited=False)
        ordinary = self._with_last(self.data, first, self.data.x[self.data.rows[second][0]], 1)
        yield Neighbours("an ordinary record", first, self.data, ordinary)
        quiet = self._quiet(first)
        changed = self._with_last(quiet, first, zero, 1)
        yield Neighbours("a record of a client without features", first, quiet, changed)

    def users(self, clients: tuple[int, ...], adjacency: Adjacency) -> Iterator[Neighbours]:
        first, second, third, *_ = clients
        rows = self.data.rows[first]
        long = self._with_rows(self.data, first, np.tile(self.long, (len(rows), 1)), np.zeros(len(rows), np.int64))
        if adjacency == "zero-out":
            yield Neighbours("a user with long records", first, long, None)
            yield Neighbours("an ordinary user", second, self.data, None)
            yield Neighbours("another user", third, self.data, None)
            return
        opposite = self._with_rows(self.data, first, np.tile(-self.long, (len(rows), 1)), np.zeros(len(rows), np.int64))
        yield Neighbours("a user with long records", first, long, opposite)
        rows = self.data.rows[second]
        turned = self._with_rows(self.data, second, self.data.x[rows], (self.data.y[rows] + 1) % self.classes)
        yield Neighbours("a user with other labels", second, self.data, turned)
        rows = self.data.rows[third]
        fewer = replace(self.data, rows=self._rows(self.data, third, rows[: len(rows) // 2]))
        yield Neighbours("a user with fewer rows", third, self.data, fewer)
        yield Neighbours("a user without features", first, self._quiet(first), self.data)

    def _with_rows(self, data: ProblemData, client: int, x: NDArray[np.float32], y: NDArray[np.int64]) -> ProblemData:
        rows, all_x, all_y = data.rows[client], data.x.copy(), data.y.copy()
        all_x[rows], all_y[rows] = x, y
        return replace(data, x=all_x, y=all_y)

    def _with_last(self, data: ProblemData, client: int, x: NDArray[np.float32], label: int) -> ProblemData:
        """The data with another last row of the client."""
        rows = data.rows[client]
        all_x, all_y = data.x[rows].copy(), data.y[rows].copy()
        all_x[-1], all_y[-1] = x, label
        return self._with_rows(data, client, all_x, all_y)

    def _without_last(self, data: ProblemData, client: int) -> ProblemData:
        """The record contributes nothing; the public size stays. It is the last row, so that samples of the other
        rows stay the same."""
        return replace(data, rows=self._rows(data, client, data.rows[client][:-1]))

    def _rows(self, data: ProblemData, client: int, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        return tuple(rows if index == client else own for index, own in enumerate(data.rows))

    def _quiet(self, client: int) -> ProblemData:
        """A client whose features are all 0 and whose labels are balanced: its gradients cancel."""
        count = len(self.data.rows[client])
        labels = np.arange(count) % self.classes
        return self._with_rows(self.data, client, np.zeros((count, len(self.long)), np.float32), labels)
