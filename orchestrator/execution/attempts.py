"""Attempts to run packs, indexed by slot, node and first trial."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, MutableMapping

from orchestrator.execution.pack_queue import Pack


class Attempts(MutableMapping[int, Pack]):
    """Packs by the number of the attempt. A pack's slot, node and trials must not change while it is in the mapping."""

    def __init__(self) -> None:
        self._packs: dict[int, Pack] = {}
        self._by_slot: dict[str, dict[int, None]] = {}
        self._by_node: dict[str, dict[int, None]] = {}
        self._by_first_trial: dict[str, dict[int, None]] = {}

    def __getitem__(self, number: int) -> Pack:
        return self._packs[number]

    def __setitem__(self, number: int, pack: Pack) -> None:
        self._packs[number] = pack
        for index, name in self._index_entries(pack):
            index.setdefault(name, {})[number] = None

    def __delitem__(self, number: int) -> None:
        for index, name in self._index_entries(self._packs.pop(number)):
            del index[name][number]
            if not index[name]:
                del index[name]

    def _index_entries(self, pack: Pack) -> list[tuple[dict[str, dict[int, None]], str]]:
        first = pack.trials[0].key
        return [(self._by_slot, pack.slot), (self._by_node, pack.node), (self._by_first_trial, first)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._packs)

    def __len__(self) -> int:
        return len(self._packs)

    @property
    def nodes(self) -> KeysView[str]:
        return self._by_node.keys()

    def of_slot(self, slot: str) -> int | None:
        """The number of the slot's attempt; None if it has none."""
        return next(iter(self._by_slot.get(slot, ())), None)

    def with_trials_of(self, pack: Pack) -> list[int]:
        """The numbers of all attempts to run exactly the trials of this pack."""
        same_first = self._by_first_trial.get(pack.trials[0].key, ())
        return [number for number in same_first if self._packs[number].keys == pack.keys]
