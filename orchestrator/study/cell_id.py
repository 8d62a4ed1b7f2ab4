"""The identity of a cell. Labels are for display only: renaming one changes no identity."""

from __future__ import annotations

from typing import NamedTuple


class SettingId(NamedTuple):
    """A data set with a partition."""

    data: str
    """`DataSettings.id`."""
    partition: str
    """As `trainables.data.partition.to_text` writes it."""


class CellId(NamedTuple):
    """One (data, partition, method, eps): the unit that is tuned."""

    data: str
    partition: str
    method: str
    """`MethodSettings.id`."""
    epsilon: float

    @property
    def setting(self) -> SettingId:
        return SettingId(self.data, self.partition)
