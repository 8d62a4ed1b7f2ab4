"""Dealing the train rows out to clients, and saying what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainables.data.features import FeatureSet, Rows
from trainables.errors import UserError, in_range
from trainables.spec import Spec


class PartitionSpec(Spec):
    """How the train rows are divided among the clients."""

    kind: str
    """iid, dirichlet, classes, explicit, or the name of a plug-in's partition."""
    parameter: float = 0.0
    """dirichlet: alpha. classes: number of classes per client."""
    clients: int = 20
    seed: int = 42


MIN_ROWS = 10  # a client with fewer is topped up from the largest
PLUGIN_PARTITIONS: dict[str, Callable[[FeatureSet, PartitionSpec], list[Rows]]] = {}
"""Plug-ins' partitions by the word before the colon: the train rows of every client."""
FORMS = ("iid", "dirichlet:ALPHA", "classes:K", "explicit")


def parse(text: str, *, clients: int, seed: int) -> PartitionSpec:
    """`iid`, `dirichlet:0.5`, `classes:2` or `explicit`."""
    kind, _, parameter = text.partition(":")
    fitting = kind in PLUGIN_PARTITIONS or (kind in _DEALERS and bool(parameter) == (kind in ("dirichlet", "classes")))
    if not fitting:
        form = next((form for form in FORMS if form.partition(":")[0] == kind), None)
        known = f"unknown; choose one of: {', '.join([*FORMS, *PLUGIN_PARTITIONS])}" if form is None else f"not {form}"
        raise UserError(f"partition = {text!r} is {known}")
    try:
        value = float(parameter or 0)
    except ValueError:
        raise UserError(f"partition = {text!r}: {parameter!r} is not a number") from None
    in_range(1, 2**31, clients=clients)
    in_range(0, 2**32 - 1, partition_seed=seed)
    if kind == "dirichlet":
        in_range(0, 1e6, "(]", alpha=value)
    if kind == "classes":
        in_range(1, 1e5, **{"classes per client": value})
        if value != int(value):
            raise UserError(f"partition = {text!r}: {parameter!r} is not a whole number of classes")
    return PartitionSpec(kind=kind, parameter=value, clients=clients, seed=seed)


def show(spec: PartitionSpec) -> str:
    """The text that `parse` reads."""
    bare = spec.kind in ("iid", "explicit") or (spec.kind in PLUGIN_PARTITIONS and spec.parameter == 0)
    return spec.kind if bare else f"{spec.kind}:{spec.parameter:g}"


class Sizes(tuple[int, ...]):
    """How many rows every client has. There may be very many clients, and as many trials ask: it is hashed once."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Partition:
    """The train rows of every client, ascending, and what was done to make it usable."""

    rows: tuple[Rows, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes(len(rows) for rows in self.rows)

    def without(self, held_out: Rows) -> Partition:
        """The same clients, the held-out rows taken from each."""
        kept = tuple(rows[~np.isin(rows, held_out)] for rows in self.rows)
        empty = [client for client, rows in enumerate(kept) if len(rows) == 0]
        if empty:
            raise UserError(f"client {empty[0]} has no row left once the validation rows are held out")
        return Partition(kept, self.notes)

    def counts(self, data: FeatureSet) -> NDArray[np.int64]:
        """Rows of every class at every client."""
        return np.stack([np.bincount(data.y_train[rows], minlength=data.classes) for rows in self.rows])


def partition(data: FeatureSet, spec: PartitionSpec) -> Partition:
    """Deal all train rows out to `spec.clients` clients."""
    total = len(data.y_train)
    if spec.clients > total:
        raise UserError(f"clients = {spec.clients} is more than the {total} train rows")
    dealt = _dealt_by_plugin(data, spec) if spec.kind in PLUGIN_PARTITIONS else _DEALERS[spec.kind](data, spec)
    empty = [client for client, rows in enumerate(dealt) if len(rows) == 0]
    if empty:
        raise UserError(
            f"partition {show(spec)} leaves client {empty[0]} of {spec.clients} without a row"
            + ("; a larger alpha spreads the rows more evenly" if spec.kind == "dirichlet" else "")
        )
    notes = _top_up(dealt, min(MIN_ROWS, total // spec.clients), spec)
    return Partition(tuple(np.sort(rows) for rows in dealt), tuple(notes))


def _dealt_by_plugin(data: FeatureSet, spec: PartitionSpec) -> list[Rows]:
    """Privacy is accounted by record: every row is to be dealt out, and to one client only."""
    dealt = [np.asarray(rows, dtype=np.int64) for rows in PLUGIN_PARTITIONS[spec.kind](data, spec)]
    all_rows = np.arange(len(data.y_train))
    if len(dealt) != spec.clients or not np.array_equal(np.sort(np.concatenate(dealt)), all_rows):
        raise UserError(
            f"partition {show(spec)}: its plug-in must deal each of the {len(data.y_train)} train rows to exactly one "
            f"of {spec.clients} clients"
        )
    return dealt


def _iid(data: FeatureSet, spec: PartitionSpec) -> list[Rows]:
    rng = np.random.RandomState(spec.seed)
    return [np.asarray(part) for part in np.array_split(rng.permutation(len(data.y_train)), spec.clients)]


def _dirichlet(data: FeatureSet, spec: PartitionSpec) -> list[Rows]:
    """The rule that gives the main paper's table 14 with seed 42: NumPy's legacy generator; class by class, shuffle
    the rows, draw the clients' proportions, cut at floor(cumulative proportion x rows)."""
    rng = np.random.RandomState(spec.seed)
    parts: list[list[Rows]] = [[] for _ in range(spec.clients)]
    for label in range(data.classes):
        rows = np.flatnonzero(data.y_train == label)
        rng.shuffle(rows)
        proportions = rng.dirichlet(np.full(spec.clients, spec.parameter))
        if not np.isfinite(proportions).all():
            raise UserError(f"partition {show(spec)}: alpha is too small to draw proportions")
        cuts = (np.cumsum(proportions) * len(rows)).astype(int)[:-1]
        for client, part in enumerate(np.split(rows, cuts)):
            parts[client].append(part)
    return [np.concatenate(part) for part in parts]


def _classes(data: FeatureSet, spec: PartitionSpec) -> list[Rows]:
    """Client i holds k neighbours on a shuffled circle of classes; a class is split evenly among its holders."""
    k = int(spec.parameter)
    if k > data.classes:
        raise UserError(f"partition {show(spec)}: the data has only {data.classes} classes")
    if k * spec.clients < data.classes:
        raise UserError(f"partition {show(spec)}: {spec.clients} clients of {k} classes cannot hold all {data.classes}")
    rng = np.random.RandomState(spec.seed)
    circle = rng.permutation(data.classes)
    holders: list[list[int]] = [[] for _ in range(data.classes)]
    for client in range(spec.clients):
        for j in range(k):
            holders[circle[(client * k + j) % data.classes]].append(client)
    parts: list[list[Rows]] = [[] for _ in range(spec.clients)]
    for label, owners in enumerate(holders):
        rows = rng.permutation(np.flatnonzero(data.y_train == label))
        for client, part in zip(owners, np.array_split(rows, len(owners)), strict=True):
            parts[client].append(part)
    return [np.concatenate(part) for part in parts]


def _explicit(data: FeatureSet, spec: PartitionSpec) -> list[Rows]:
    if data.client_train is None:
        raise UserError(f"partition explicit: data {data.name} has no client_train column")
    if data.clients != spec.clients:
        raise UserError(
            f"clients = {spec.clients}, but data {data.name} names {data.clients} clients; clients: auto takes them"
        )
    return [np.flatnonzero(data.client_train == client) for client in range(spec.clients)]


_DEALERS = {"iid": _iid, "dirichlet": _dirichlet, "classes": _classes, "explicit": _explicit}


def _top_up(dealt: list[Rows], least: int, spec: PartitionSpec) -> list[str]:
    if spec.kind == "explicit":
        return []
    notes = []
    for client, rows in enumerate(dealt):
        given: dict[int, int] = {}
        for _ in range(least - len(rows)):  # row by row from whoever has most then, so that no giver falls short itself
            giver = max(range(len(dealt)), key=lambda i: len(dealt[i]))
            dealt[client] = np.append(dealt[client], dealt[giver][-1])
            dealt[giver] = dealt[giver][:-1]
            given[giver] = given.get(giver, 0) + 1
        if given:
            gifts = " and ".join(f"{count} of client {giver}'s" for giver, count in given.items())
            notes.append(f"client {client} had {len(rows)} rows and was given {gifts}")
    return notes


def divergence_from_uniform(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """KL divergence of every client's label distribution from the uniform one, in nats."""
    p = counts / counts.sum(axis=1, keepdims=True)
    return (p * np.log(np.maximum(p, 1e-300) * counts.shape[1])).sum(axis=1)  # of 0, whatever its logarithm, 0
