"""The desk where the driver leaves packs and federations fetch them: neither ever waits for the other.

An actor beside the driver. It holds no truth: which trials have ended is in the ledger, who has which pack the
conductor knows. What goes over it is bytes, so that its process needs nothing of what is in them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Order:
    """A pack to run."""

    number: int
    """Of this attempt: a pack that is taken up again has another one."""
    trials: bytes
    problem: str = ""
    """The key of what they are trained on."""
    resume_from: str = ""
    """The checkpoint to go on from."""
    shipment: Any = None
    """A reference to that problem: a slot passes it on and needs nothing of what is in it."""


@dataclass(frozen=True)
class Report:
    """What a slot says of a pack."""

    slot: str
    number: int
    kind: Literal["began", "went on", "ended", "too large", "lost"]
    """lost: says the desk, of a pack that its slot never got."""
    round: int = 0
    running: int = 0
    computing_s: float = 0.0
    lanes: bytes = b""
    """ended: what became of every trial."""
    fits: int = 0
    """too large: how many lanes the device has memory for."""
    saved: str = ""
    """The checkpoint that holds the pack now."""
    notes: tuple[str, ...] = ()
    """What went wrong and was got over."""
    node: str = ""


class PackDesk:
    def __init__(self) -> None:
        self._orders: deque[Order] = deque()
        self._reports: list[Report] = []
        self._shunned: set[str] = set()
        self._held: dict[str, int] = {}
        """The pack that a slot has."""
        self._asked: dict[str, int] = {}
        """How often a slot has come."""
        self._closed = False
        self._changed = asyncio.Condition()

    # ---- slots

    async def take(self, slot: str, node: str, patience_s: float) -> Order | None:
        """The next pack, as soon as there is one; none, if for so long there was none.

        Whoever comes has nothing: if a pack was handed out to that slot, then to a process that had died meanwhile, and
        nobody works on it."""
        self._asked[slot] = asked = self._asked.get(slot, 0) + 1
        if (lost := self._held.pop(slot, None)) is not None:
            self._reports.append(Report(slot, lost, "lost"))

        def superseded() -> bool:
            return self._asked[slot] != asked

        def answered() -> bool:
            return self._closed or superseded() or (bool(self._orders) and node not in self._shunned)

        async with self._changed:
            self._changed.notify_all()
            if not answered() and patience_s > 0:
                try:
                    await asyncio.wait_for(self._changed.wait_for(answered), patience_s)
                except TimeoutError:
                    return None
            if self._closed or superseded() or not answered():
                return None
            order = self._orders.popleft()
            self._held[slot] = order.number
            self._reports.append(Report(slot, order.number, "began", node=node))
            return order

    async def tell(self, report: Report) -> None:
        self._reports.append(report)
        if report.kind in ("ended", "too large") and self._held.get(report.slot) == report.number:
            del self._held[report.slot]

    # ---- the driver

    async def exchange(self, orders: Sequence[Order], shunned: Iterable[str] = ()) -> tuple[list[Report], int]:
        """Leaves packs; takes what was said since, in its order, and how many packs lie here."""
        async with self._changed:
            self._orders.extend(orders)
            self._shunned = set(shunned)
            self._changed.notify_all()
        said, self._reports = self._reports, []
        return said, len(self._orders)

    async def forget(self, slots: Iterable[str]) -> None:
        """They have died: what they had come for goes to others."""
        async with self._changed:
            for slot in slots:
                self._asked[slot] = self._asked.get(slot, 0) + 1
            self._changed.notify_all()

    async def withdraw(self) -> list[int]:
        """Takes back all packs that nobody has begun."""
        left = [order.number for order in self._orders]
        self._orders.clear()
        return left

    async def close(self) -> None:
        """Whoever waits is sent away."""
        async with self._changed:
            self._closed = True
            self._orders.clear()
            self._changed.notify_all()
