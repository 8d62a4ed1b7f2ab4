"""The desk: an actor on the driver's node. The driver leaves packs there and slots fetch them; neither waits.

The desk keeps no state that matters: the ledger knows which trials have ended, the scheduler which slot has which pack.
Trials and results pass through it pickled, so that its process imports nothing of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

from trainables.federation.messages import Order, Report


class PackDesk:
    def __init__(self) -> None:
        self._orders: deque[Order] = deque()
        self._reports: list[Report] = []
        self._blocked_nodes: set[str] = set()
        """These get no packs."""
        self._leaving_nodes: set[str] = set()
        """These get no packs, and packs that run there are handed back."""
        self._packs: dict[str, int] = {}
        """The pack of every slot that has one."""
        self._requests: dict[str, int] = {}
        """How often every slot has asked for a pack."""
        self._superseded: set[int] = set()
        """Packs that need no answer any more."""
        self._closed = False
        self._changed = asyncio.Condition()

    # ---- called by slots

    async def take(self, slot: str, nodes: Sequence[str], timeout_s: float) -> Order | Literal["leave"] | None:
        """The next pack as soon as there is one; None after the timeout. "leave": a slot on these nodes gets none.

        `nodes`: those of the slot and its federation, the slot's own first.

        A slot that asks has no pack. If the desk has handed one to it, the slot's process has died since, and the pack
        is lost."""
        self._requests[slot] = request = self._requests.get(slot, 0) + 1
        if (lost := self._packs.pop(slot, None)) is not None:
            self._reports.append(Report(slot, lost, "lost"))

        def superseded() -> bool:
            return self._requests[slot] != request

        def excluded() -> bool:
            return not (self._blocked_nodes | self._leaving_nodes).isdisjoint(nodes)

        def suitable() -> Order | None:
            return next((order for order in self._orders if set(order.not_on).isdisjoint(nodes)), None)

        def ready() -> bool:
            return self._closed or superseded() or excluded() or suitable() is not None

        async with self._changed:
            self._changed.notify_all()
            if not ready() and timeout_s > 0:
                try:
                    await asyncio.wait_for(self._changed.wait_for(ready), timeout_s)
                except TimeoutError:
                    return None
            if self._closed or superseded() or not ready():
                return None
            if excluded():
                return "leave"
            order = suitable()
            assert order is not None
            self._orders.remove(order)
            self._packs[slot] = order.number
            self._reports.append(Report(slot, order.number, "started", nodes=tuple(nodes)))
            return order

    async def alive(self, slot: str, nodes: Sequence[str]) -> Literal["hand back", "drop", ""]:
        """A heartbeat of a slot; what it should do with its pack: hand it back because one of its nodes is about to
        leave, or drop it because another slot was faster."""
        self._reports.append(Report(slot, 0, "alive"))
        if self._packs.get(slot) in self._superseded:
            return "drop"
        return "" if self._leaving_nodes.isdisjoint(nodes) else "hand back"

    async def report(self, report: Report) -> None:
        self._reports.append(report)
        if (
            report.kind in ("ended", "too large", "handed back", "dropped")
            and self._packs.get(report.slot) == report.number
        ):
            del self._packs[report.slot]

    # ---- called by the driver

    async def exchange(
        self,
        orders: Sequence[Order],
        blocked_nodes: Iterable[str] = (),
        leaving_nodes: Iterable[str] = (),
        superseded: Iterable[int] = (),
    ) -> list[Report]:
        """Leave packs, and take all reports since the last call, in order."""
        async with self._changed:
            self._superseded.update(superseded)
            self._orders = deque(order for order in (*self._orders, *orders) if order.number not in self._superseded)
            self._blocked_nodes, self._leaving_nodes = set(blocked_nodes), set(leaving_nodes)
            self._changed.notify_all()
        reports, self._reports = self._reports, []
        return reports

    async def forget(self, slots: Iterable[str]) -> None:
        """These slots have died: their pending requests get no pack."""
        async with self._changed:
            for slot in slots:
                self._requests[slot] = self._requests.get(slot, 0) + 1
            self._changed.notify_all()

    async def withdraw(self) -> list[int]:
        """Take back all packs that no slot has taken."""
        numbers = [order.number for order in self._orders]
        self._orders.clear()
        return numbers

    async def close(self) -> None:
        """Answer all waiting slots with None."""
        async with self._changed:
            self._closed = True
            self._orders.clear()
            self._changed.notify_all()
