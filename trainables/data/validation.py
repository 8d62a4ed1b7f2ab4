"""Holds out validation rows from the clients' train rows. Every client that trains keeps at least one row."""

from __future__ import annotations

import numpy as np

from trainables.choices import ValidationBy
from trainables.data.features import FeatureSet, ValidationSet
from trainables.data.partition import Partition
from trainables.errors import UserError, in_range


def hold_out(
    data: FeatureSet, clients: Partition, by: ValidationBy, fraction: float, seed: int, stratified: bool = True
) -> tuple[Partition, ValidationSet]:
    """The clients without their validation rows, and those rows.

    `row`: the same fraction of every class, or of all rows if not stratified. A client whose rows would all be held out
    keeps its first row.
    `client`: whole clients, drawn by number. The draw depends on neither their values nor their sizes."""
    in_range(0, 1, "()", validation_fraction=fraction)
    if by == "client":
        return _whole_clients(data, clients, fraction, seed)
    return _without(data, clients, data.validation_set(fraction, seed, stratified))


def _without(data: FeatureSet, clients: Partition, drawn: ValidationSet) -> tuple[Partition, ValidationSet]:
    """A drawn row that its client keeps is not a validation row."""
    train = clients.without(drawn.rows)
    kept = ~np.isin(drawn.rows, np.concatenate(train.rows))
    if kept.all():
        return train, drawn
    if not kept.any():
        raise UserError(
            f"data {data.name}: every validation row is the only row of its client; validation by client holds out "
            "whole clients"
        )
    return train, ValidationSet(drawn.rows[kept], drawn.x[kept], drawn.y[kept])


def _whole_clients(data: FeatureSet, clients: Partition, fraction: float, seed: int) -> tuple[Partition, ValidationSet]:
    count = len(clients.rows)
    if count < 2:
        raise UserError(f"validation by client needs at least 2 clients, data {data.name} has {count}")
    held_out = min(count - 1, max(1, round(fraction * count)))
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(count)
    chosen = set(order[:held_out].tolist())
    rows = np.sort(np.concatenate([clients.rows[client] for client in sorted(chosen)]))
    train = tuple(rows for client, rows in enumerate(clients.rows) if client not in chosen)
    return Partition(train, clients.notes), ValidationSet(rows, data.x_train[rows], data.y_train[rows])
