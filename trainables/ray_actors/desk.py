"""The desk: an actor on the driver's node. The driver leaves packs there and slots fetch them. The driver never waits
for a slot.

The desk keeps no state that matters: the ledger knows which trials have ended, the scheduler which slot has which pack.
Trials and results pass through it pickled, so that its process need not import their classes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainables.federation.messages import Order, Report

MESSAGES_PER_S = 400  # heartbeats of all slots together; each takes about a millisecond of the desk's time
STEPS_PER_S = 100  # Tune steps of all slots together; each costs the driver a few milliseconds
PACE_EVERY_S = 1.0  # between two updates of the pace
SLOT_LEFT_S = 60.0  # a slot that sends no message for this long is no longer counted


class Pace(NamedTuple):
    """How often a slot should send messages: less often, the more slots there are."""

    heartbeat_s: float
    """Time between two heartbeats. Each carries the slot's latest report."""
    step_s: float
    """Target duration of a Tune step."""
    idle_s: float
    """How long a slot without a pack waits at the desk per step."""

    @classmethod
    def of(cls, slots: int) -> Pace:
        step = slots / STEPS_PER_S
        return cls(max(0.5, slots / MESSAGES_PER_S), max(1.0, step), max(2.0, step))


class Advice(NamedTuple):
    """The answer to a heartbeat."""

    action: Literal["hand back", "drop", ""]
    """What the slot should do with its pack: hand it back because one of its nodes is about to leave, or drop it
    because its results are no longer needed."""
    pace: Pace


@dataclass(frozen=True)
class _Request:
    """The request of a slot that waits for a pack."""

    nodes: Sequence[str]
    accelerator: str
    code: str
    answer: asyncio.Future

    def may_take(self, order: Order) -> bool:
        return not order.not_on or set(order.not_on).isdisjoint(self.nodes)


class PackDesk:
    def __init__(self) -> None:
        self._orders: dict[int, Order] = {}
        """Packs that no slot has taken, by number, oldest first. The slots that wait may take none of them
        (`Order.not_on`)."""
        self._reports: list[Report] = []
        self._excluded_nodes: set[str] = set()
        """Nodes that get no packs: they are blocked or about to leave."""
        self._leaving_nodes: set[str] = set()
        """Nodes that are about to leave: their packs are handed back."""
        self._packs: dict[str, int] = {}
        """The pack of every slot that has one."""
        self._requests: dict[str, _Request] = {}
        """The latest request of every slot that waits for a pack, the longest waiting first."""
        self._heard: dict[str, float] = {}
        """The time of the last message of every slot."""
        self._pace, self._paced = Pace.of(1), 0.0
        self._superseded: set[int] = set()
        """The numbers in `_packs` whose results are no longer needed."""
        self._closed = False

    # ---- called by slots

    async def take(
        self,
        slot: str,
        nodes: Sequence[str],
        timeout_s: float,
        accelerator: str = "",
        code: str = "",
        last: Report | None = None,
    ) -> Order | Literal["leave"] | None:
        """The next pack as soon as there is one. None after the timeout, or if the desk is closed. "leave" if one of
        the nodes gets no packs.

        `nodes`: those of the slot and its federation, the slot's own first. `accelerator`: the model of its GPUs.
        `code`: the digest of its code. `last`: the final report about the slot's last pack.

        A slot that asks has no pack. If the desk handed it one and got no final report, the slot's process has died
        since, and the pack is lost."""
        self._heard[slot] = time.monotonic()
        if last is not None:
            self._reports.append(last)
            self._end(slot, last.number)
        self._answer(slot, None)  # ends the request of an earlier process of the slot
        if (lost := self._packs.get(slot)) is not None:
            self._end(slot, lost)
            self._reports.append(Report(slot, lost, "lost"))
        answer = asyncio.get_running_loop().create_future()
        request = self._requests[slot] = _Request(nodes, accelerator, code, answer)
        if self._closed:
            self._answer(slot, None)
        elif not self._excluded_nodes.isdisjoint(nodes):
            self._answer(slot, "leave")
        elif (order := next(filter(request.may_take, self._orders.values()), None)) is not None:
            self._hand_out(order, slot, request)
        if not request.answer.done():
            await asyncio.wait([request.answer], timeout=timeout_s)
        if not request.answer.done():
            self._answer(slot, None)
        return request.answer.result()

    def _offer(self, order: Order) -> None:
        """Give a new pack to the slot that has waited longest."""
        self._orders[order.number] = order
        suitable = (item for item in self._requests.items() if item[1].may_take(order))
        if (found := next(suitable, None)) is not None:
            self._hand_out(order, *found)

    def _hand_out(self, order: Order, slot: str, request: _Request) -> None:
        del self._orders[order.number]
        self._packs[slot] = order.number
        self._reports.append(
            Report(
                *(slot, order.number, "started"),
                nodes=tuple(request.nodes),
                accelerator=request.accelerator,
                code=request.code,
            )
        )
        self._answer(slot, order)

    def _end(self, slot: str, number: int) -> None:
        """The slot does not have this pack any more."""
        if self._packs.get(slot) == number:
            del self._packs[slot]
            self._superseded.discard(number)

    def _answer(self, slot: str, answer: Order | Literal["leave"] | None) -> None:
        request = self._requests.pop(slot, None)
        if request is not None and not request.answer.done():  # done: its caller was cancelled
            request.answer.set_result(answer)

    async def alive(self, slot: str, nodes: Sequence[str], report: Report | None = None) -> Advice:
        """A heartbeat of a slot, with its latest report if there is a new one."""
        now = self._heard[slot] = time.monotonic()
        self._reports.append(report or Report(slot, 0, "alive"))
        if now - self._paced > PACE_EVERY_S:
            self._heard = {other: heard for other, heard in self._heard.items() if now - heard < SLOT_LEFT_S}
            self._pace, self._paced = Pace.of(len(self._heard)), now
        pace = self._pace
        if self._packs.get(slot) in self._superseded:
            return Advice("drop", pace)
        return Advice("" if self._leaving_nodes.isdisjoint(nodes) else "hand back", pace)

    # ---- called by the driver

    async def exchange(
        self,
        orders: Sequence[Order],
        blocked_nodes: Iterable[str] = (),
        leaving_nodes: Iterable[str] = (),
        superseded: Iterable[int] = (),
    ) -> list[Report]:
        """Leave packs, and take all reports since the last call, in order. `superseded`: numbers of packs whose results
        are no longer needed."""
        if superseded := set(superseded):
            self._superseded |= superseded & set(self._packs.values())
            for number in superseded:
                self._orders.pop(number, None)
        self._leaving_nodes = set(leaving_nodes)
        excluded = self._leaving_nodes.union(blocked_nodes)
        if not excluded <= self._excluded_nodes:
            for slot in [slot for slot, request in self._requests.items() if not excluded.isdisjoint(request.nodes)]:
                self._answer(slot, "leave")
        self._excluded_nodes = excluded
        reports, self._reports = self._reports, []
        for order in orders:
            self._offer(order)
        return reports

    async def forget(self, slots: Iterable[str]) -> None:
        """These slots have died: their pending requests get no pack."""
        for slot in slots:
            self._answer(slot, None)
            self._heard.pop(slot, None)

    async def withdraw(self) -> list[int]:
        """Take back all packs that no slot has taken."""
        numbers = list(self._orders)
        self._orders.clear()
        return numbers

    async def close(self) -> None:
        """Answer all waiting slots with None."""
        self._closed = True
        self._orders.clear()
        for slot in list(self._requests):
            self._answer(slot, None)
