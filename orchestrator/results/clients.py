"""Test accuracy by client, where the data set names the client of every test row. For the analyst: not private."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.results.ledger import Ledger
from orchestrator.results.searches import SearchedCell
from orchestrator.study.cell_id import SettingId


@dataclass(frozen=True)
class ClientRows:
    """The rows of the clients of a setting."""

    train: Sequence[int]
    """Number of train rows of every client."""
    test: Sequence[int]
    """The client of every test row."""
    names: Sequence[str]
    """The name of every client; empty if clients have numbers only."""


@dataclass(frozen=True)
class ClientAccuracy:
    client: str
    """Its name, or its number."""
    train_rows: int
    test_rows: int
    accuracy: float
    """In percent; the mean over the confirm runs."""


def client_rows(ledger: Ledger) -> dict[SettingId, ClientRows]:
    """By setting, where the partition is explicit and test rows have clients."""
    of_test = ledger.test_clients()
    found: dict[SettingId, ClientRows] = {}
    for (setting, _), counts in ledger.partitions().items():
        if setting.partition == "explicit" and setting.data in of_test:
            found.setdefault(setting, ClientRows([sum(classes) for classes in counts], *of_test[setting.data]))
    return found


def by_client(
    cell: SearchedCell, correct: Sequence[bytes], rows: Mapping[SettingId, ClientRows]
) -> list[ClientAccuracy]:
    """Lowest accuracy first. `correct`: for each confirm run, whether each test row was classified correctly, as packed
    bits."""
    known = rows.get(cell.cell_id.setting)
    runs = [np.unpackbits(np.frombuffer(bits, np.uint8))[: len(known.test)] for bits in correct if bits and known]
    if known is None or not runs:
        return []
    clients, counts = np.asarray(known.test), np.bincount(known.test)
    shares = 100 * np.bincount(clients, weights=np.mean(runs, axis=0)) / np.maximum(counts, 1)
    names = known.names if len(known.names) == len(known.train) else [str(client) for client in range(len(known.train))]
    found = [
        ClientAccuracy(names[client], known.train[client], int(counts[client]), float(shares[client]))
        for client in np.flatnonzero(counts).tolist()
        if client < len(known.train)
    ]
    return sorted(found, key=lambda one: one.accuracy)  # stable: equal accuracies stay in the order of client numbers


def worst_tenth(accuracies: Sequence[ClientAccuracy]) -> Sequence[ClientAccuracy]:
    """The tenth of the clients with the lowest accuracy, at least one; `accuracies` has the lowest first."""
    return accuracies[: math.ceil(len(accuracies) / 10)]
