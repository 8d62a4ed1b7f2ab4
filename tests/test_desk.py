"""The desk alone, without Ray: packs of slots that have died."""

import asyncio

from trainables.federation.messages import Order, Report
from trainables.ray_actors.desk import Pace, PackDesk

FIRST, SECOND = (Order(number, b"trials") for number in (1, 2))


async def waiting(desk: PackDesk, slot: str) -> asyncio.Task:
    """A slot that asks for a pack while there is none."""
    task = asyncio.ensure_future(desk.take(slot, ["node"], 60))
    await asyncio.sleep(0)  # now the request waits
    return task


def kinds(reports: list[Report]) -> list[tuple[str, int, str]]:
    return [(report.slot, report.number, report.kind) for report in reports]


def test_a_waiting_slot_gets_the_next_pack():
    async def play():
        desk = PackDesk()
        slot = asyncio.ensure_future(desk.take("a", ["node"], 60, "NVIDIA H200", "a digest"))
        await asyncio.sleep(0)
        await desk.exchange([FIRST])
        assert await slot == FIRST
        (started,) = await desk.exchange([])
        expected = ("a", 1, "started", ("node",), "NVIDIA H200", "a digest")
        found = (started.slot, started.number, started.kind, started.nodes, started.accelerator, started.code)
        assert found == expected

    asyncio.run(play())


def test_only_the_latest_request_of_a_slot_is_served():
    """The process that asked first was killed: a pack handed to it would never be run."""

    async def play():
        desk = PackDesk()
        dead = await waiting(desk, "a")
        alive = await waiting(desk, "a")
        await desk.exchange([FIRST])
        assert await dead is None
        assert await alive == FIRST

    asyncio.run(play())


def test_a_pack_that_was_handed_to_a_dead_process_is_reported_lost():
    """Between the death of a slot and its next start a pack was laid out, and went to the one that still seemed to
    wait. The slot comes again with empty hands."""

    async def play():
        desk = PackDesk()
        dead = await waiting(desk, "a")
        await desk.exchange([FIRST])
        assert await dead == FIRST, "the answer is lost"
        alive = await waiting(desk, "a")
        assert kinds(await desk.exchange([SECOND])) == [("a", 1, "started"), ("a", 1, "lost")]
        assert await alive == SECOND

    asyncio.run(play())


def test_a_pack_that_has_ended_is_not_lost():
    async def play():
        desk = PackDesk()
        await desk.exchange([FIRST, SECOND])
        last = None
        for number in (1, 2):
            assert (await desk.take("a", ["node"], 0, last=last)).number == number
            await desk.alive("a", ["node"], Report("a", number, "progress"))
            last = Report("a", number, "ended" if number == 1 else "too large")
        assert await desk.take("a", ["node"], 0, last=last) is None
        found = kinds(await desk.exchange([]))
        expected = [(1, "started"), (1, "progress"), (1, "ended"), (2, "started"), (2, "progress"), (2, "too large")]
        assert found == [("a", *report) for report in expected]

    asyncio.run(play())


def test_requests_of_dead_slots_get_no_pack():
    """Once a slot is known to be dead, its pack goes to another."""

    async def play():
        desk = PackDesk()
        dead, alive = await waiting(desk, "dead"), await waiting(desk, "alive")
        await desk.forget(["dead"])
        await desk.exchange([FIRST])
        assert await dead is None
        assert await alive == FIRST

    asyncio.run(play())


def test_a_slot_on_a_blocked_or_leaving_node_is_sent_away_at_once():
    """Also if the node is that of one of its hosts, and also if it is waiting already."""

    async def play():
        desk = PackDesk()
        slot = await waiting(desk, "a")
        await desk.exchange([FIRST], ["node"])
        assert await slot == "leave"
        assert await desk.take("b", ["other", "node"], 0) == "leave"
        await desk.exchange([], [], ["node"])
        assert await desk.take("b", ["other", "node"], 0) == "leave"
        assert await desk.take("b", ["other"], 0) == FIRST
        assert (await desk.alive("b", ["other"])).action == ""
        assert (await desk.alive("a", ["node"])).action == "hand back"
        assert kinds(await desk.exchange([]))[-2:] == [("b", 0, "alive"), ("a", 0, "alive")]
        assert await desk.take("a", ["node"], 0) is None, "the node gets packs again, but there is none"

    asyncio.run(play())


def test_a_pack_that_was_handed_back_is_not_lost():
    async def play():
        desk = PackDesk()
        await desk.exchange([FIRST])
        await desk.take("a", ["node"], 0)
        assert await desk.take("a", ["node"], 0, last=Report("a", 1, "handed back")) is None
        assert "lost" not in {report.kind for report in await desk.exchange([])}

    asyncio.run(play())


def test_a_pack_that_another_slot_has_ended_is_dropped():
    """By the slot that runs it, or at the desk if no slot has taken it."""

    async def play():
        desk = PackDesk()
        await desk.exchange([FIRST, SECOND])
        assert await desk.take("a", ["node"], 0) == FIRST
        await desk.exchange([], superseded=[1, 2])
        assert (await desk.alive("a", ["node"])).action == "drop"
        assert await desk.take("a", ["node"], 0, last=Report("a", 1, "dropped")) is None
        assert (await desk.alive("a", ["node"])).action == ""
        assert "lost" not in {report.kind for report in await desk.exchange([])}

    asyncio.run(play())


def test_a_copy_is_not_for_the_node_that_is_slow():
    """A slot there gets the next pack; a slot elsewhere gets the copy."""

    async def play():
        desk = PackDesk()
        copy = Order(3, b"trials", not_on=("slow",))
        await desk.exchange([copy])
        assert await desk.take("a", ["slow"], 0) is None
        await desk.exchange([FIRST])
        assert await desk.take("a", ["slow"], 0) == FIRST
        assert await desk.take("b", ["fast"], 0) == copy

    asyncio.run(play())


def test_more_slots_send_fewer_messages_each():
    """Two thousand slots send no more messages a second than the desk can handle, and few slots report often."""

    async def play(slots: int) -> Pace:
        desk = PackDesk()
        for number in range(slots):
            await desk.take(f"slot {number}", ["node"], 0)
        return (await desk.alive("slot 0", ["node"])).pace

    assert asyncio.run(play(4)) == Pace(0.5, 1.0, 2.0)
    assert asyncio.run(play(2000)) == Pace(5.0, 20.0, 20.0)


def test_a_heartbeat_brings_the_latest_report():
    async def play():
        desk = PackDesk()
        await desk.alive("a", ["node"], Report("a", 7, "progress", round=3))
        assert [(report.number, report.round) for report in await desk.exchange([])] == [(7, 3)]

    asyncio.run(play())


def test_packs_go_to_the_slots_that_have_waited_longest():
    async def play():
        desk = PackDesk()
        first, second = await waiting(desk, "a"), await waiting(desk, "b")
        await desk.exchange([FIRST])
        await desk.exchange([SECOND])
        assert (await first, await second) == (FIRST, SECOND)

    asyncio.run(play())
