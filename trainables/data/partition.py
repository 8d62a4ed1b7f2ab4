"""Partitions: which train rows each client holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainables.choices import Clients
from trainables.data.features import FeatureSet, Rows
from trainables.errors import LOAD_A_PLUGIN, UserError, choices, in_range
from trainables.plugin_errors import plugin_errors
from trainables.spec import Spec


class PartitionSpec(Spec):
    """How the train rows are divided among the clients."""

    kind: str
    """iid, dirichlet, classes, explicit, or the name of a plug-in's partition."""
    parameter: float = 0.0
    """The number after the colon. dirichlet: alpha. classes: number of classes per client."""
    clients: int = 20
    seed: int = 42


DEFAULT = "dirichlet:0.5"
CLIENTS = 20
MIN_ROWS = 10  # a client with fewer receives rows from the largest clients, except with `explicit`
PLUGIN_PARTITIONS: dict[str, Callable[[FeatureSet, PartitionSpec], list[Rows]]] = {}
"""Partitions of plug-ins by kind: each returns the train rows of every client."""
FORMS = ("iid", "dirichlet:ALPHA", "classes:K", "explicit")


def parse(text: str, *, clients: int, seed: int) -> PartitionSpec:
    """Parse a partition: `iid`, `dirichlet:0.5`, `classes:2`, `explicit`, or KIND or KIND:NUMBER of a plug-in."""
    kind, _, parameter = text.partition(":")
    form = next((form for form in FORMS if form.partition(":")[0] == kind), None)
    if form is None and kind not in PLUGIN_PARTITIONS:
        known = choices(text, [*FORMS, *PLUGIN_PARTITIONS])
        raise UserError(f"partition = {text!r} is unknown; {known}{LOAD_A_PLUGIN}")
    if form is not None and bool(parameter) != (":" in form):
        raise UserError(f"partition = {text!r} is not {form}")
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


def clients_of(clients: Clients, data: FeatureSet | None = None) -> int:
    """The number of clients. `auto`: as many as the data set defines, or 1 while the data is not loaded."""
    if clients != "auto":
        return clients
    if data is None:
        return 1
    if data.clients is None:
        raise UserError(f"clients = 'auto': data {data.name} has no client_train column; give a number")
    return data.clients


def choose(text: str | None, clients: Clients | None, *, seed: int, data: FeatureSet | None = None) -> PartitionSpec:
    """Parse a partition, with defaults. If `text` is None: `explicit` if the data set defines clients and `clients` is
    not a number, else `dirichlet:0.5`. If `clients` is None: the data set's clients for `explicit`, else 20."""
    own = data is not None and data.clients is not None and not isinstance(clients, int)
    text = text or ("explicit" if own else DEFAULT)
    if clients is None:
        clients = "auto" if text == "explicit" else CLIENTS
    return parse(text, clients=clients_of(clients, data), seed=seed)


def to_text(spec: PartitionSpec) -> str:
    """The inverse of `parse`."""
    bare = spec.kind in ("iid", "explicit") or (spec.kind in PLUGIN_PARTITIONS and spec.parameter == 0)
    return spec.kind if bare else f"{spec.kind}:{spec.parameter:g}"


class Sizes(tuple[int, ...]):
    """The number of rows of every client. The hash is cached: every trial needs it, and there may be many clients."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Partition:
    """The train rows of every client, ascending."""

    rows: tuple[Rows, ...]
    notes: tuple[str, ...] = ()
    """How many rows each client with too few received, and from which clients."""

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes(len(rows) for rows in self.rows)

    def without(self, validation_rows: Rows) -> Partition:
        """The same clients without the validation rows. A client that would be left without a row keeps its first."""
        train_rows = (rows[~np.isin(rows, validation_rows)] for rows in self.rows)
        kept = tuple(left if len(left) else rows[:1] for left, rows in zip(train_rows, self.rows, strict=True))
        return Partition(kept, self.notes)

    def counts(self, data: FeatureSet) -> NDArray[np.int64]:
        """(clients, classes): the number of rows of every class at every client."""
        return np.stack([np.bincount(data.y_train[rows], minlength=data.classes) for rows in self.rows])


def partition(data: FeatureSet, spec: PartitionSpec) -> Partition:
    """Assign every train row to one of `spec.clients` clients."""
    total = len(data.y_train)
    if spec.clients > total:
        raise UserError(f"clients = {spec.clients} is more than the {total} train rows")
    parts = _by_plugin(data, spec) if spec.kind in PLUGIN_PARTITIONS else _PARTITIONERS[spec.kind](data, spec)
    empty = [client for client, rows in enumerate(parts) if len(rows) == 0]
    if empty:
        raise UserError(
            f"partition {to_text(spec)} leaves client {empty[0]} of {spec.clients} without a row"
            + ("; a larger alpha spreads the rows more evenly" if spec.kind == "dirichlet" else "")
        )
    notes = [] if spec.kind == "explicit" else _top_up(parts, min(MIN_ROWS, total // spec.clients))
    return Partition(tuple(np.sort(rows) for rows in parts), tuple(notes))


def _by_plugin(data: FeatureSet, spec: PartitionSpec) -> list[Rows]:
    """Every row must belong to exactly one client, or privacy per record would be accounted wrongly."""
    with plugin_errors(f"partition {spec.kind!r}"):
        parts = [np.asarray(rows, dtype=np.int64) for rows in PLUGIN_PARTITIONS[spec.kind](data, spec)]
    all_rows = np.arange(len(data.y_train))
    if len(parts) != spec.clients or not np.array_equal(np.sort(np.concatenate(parts)), all_rows):
        raise UserError(
            f"partition {to_text(spec)}: its plug-in must assign each of the {len(data.y_train)} train rows to exactly "
            f"one of {spec.clients} clients"
        )
    return parts


def _iid(data: FeatureSet, spec: PartitionSpec) -> list[Rows]:
    rng = np.random.RandomState(spec.seed)
    return [np.asarray(part) for part in np.array_split(rng.permutation(len(data.y_train)), spec.clients)]


def _dirichlet(data: FeatureSet, spec: PartitionSpec) -> list[Rows]:
    """The procedure that reproduces the main paper's table 14 with seed 42. With NumPy's legacy generator, for each
    class: shuffle its rows, draw the clients' proportions, cut at floor(cumulative proportion x rows)."""
    rng = np.random.RandomState(spec.seed)
    parts: list[list[Rows]] = [[] for _ in range(spec.clients)]
    for label in range(data.classes):
        rows = np.flatnonzero(data.y_train == label)
        rng.shuffle(rows)
        proportions = rng.dirichlet(np.full(spec.clients, spec.parameter))
        if not np.isfinite(proportions).all():
            raise UserError(f"partition {to_text(spec)}: alpha is too small to draw proportions")
        cuts = (np.cumsum(proportions) * len(rows)).astype(int)[:-1]
        for client, part in enumerate(np.split(rows, cuts)):
            parts[client].append(part)
    return [np.concatenate(part) for part in parts]


def _classes(data: FeatureSet, spec: PartitionSpec) -> list[Rows]:
    """The classes are shuffled. Each client takes the next k of them, starting again after the last one. A class is
    split evenly among the clients that hold it."""
    k = int(spec.parameter)
    if k > data.classes:
        raise UserError(f"partition {to_text(spec)}: the data has only {data.classes} classes")
    if k * spec.clients < data.classes:
        raise UserError(
            f"partition {to_text(spec)}: {spec.clients} clients of {k} classes cannot hold all {data.classes}"
        )
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


_PARTITIONERS = {"iid": _iid, "dirichlet": _dirichlet, "classes": _classes, "explicit": _explicit}


def _top_up(parts: list[Rows], minimum: int) -> list[str]:
    """Move rows to clients that have fewer than the minimum. Each row comes from the client that is largest at that
    moment, so no donor falls below the minimum itself."""
    notes = []
    for client, rows in enumerate(parts):
        moved: dict[int, int] = {}
        for _ in range(minimum - len(rows)):
            donor = max(range(len(parts)), key=lambda i: len(parts[i]))
            parts[client] = np.append(parts[client], parts[donor][-1])
            parts[donor] = parts[donor][:-1]
            moved[donor] = moved.get(donor, 0) + 1
        if moved:
            received = " and ".join(f"{count} from client {donor}" for donor, count in moved.items())
            notes.append(f"client {client} had {len(rows)} rows and received {received}")
    return notes


def divergence_from_uniform(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """KL divergence of every client's label distribution from the uniform one, in nats."""
    p = counts / counts.sum(axis=1, keepdims=True)
    return (p * np.log(np.maximum(p, 1e-300) * counts.shape[1])).sum(axis=1)  # 0 log 0 is 0
