"""The desk by itself, without Ray: what becomes of packs whose slot is no longer there."""

import asyncio

from trainables.federation.messages import Order, Report
from trainables.ray_actors.desk import PackDesk

FIRST, SECOND = (Order(number, b"trials") for number in (1, 2))


async def waiting(desk: PackDesk, slot: str) -> asyncio.Task:
    """A slot that has come for a pack where there is none yet."""
    task = asyncio.ensure_future(desk.take(slot, "node", 60))
    await asyncio.sleep(0)  # now it waits
    return task


def kinds(reports: list[Report]) -> list[tuple[str, int, str]]:
    return [(report.slot, report.number, report.kind) for report in reports]


def test_a_pack_is_for_whoever_waits():
    async def play():
        desk = PackDesk()
        slot = await waiting(desk, "a")
        await desk.exchange([FIRST])
        assert await slot == FIRST
        assert kinds(await desk.exchange([])) == [("a", 1, "started")]

    asyncio.run(play())


def test_a_slot_that_waits_twice_has_died_the_first_time():
    """What asked first was killed: a pack that went to it would be worked on by nobody, for ever."""

    async def play():
        desk = PackDesk()
        dead = await waiting(desk, "a")
        alive = await waiting(desk, "a")
        await desk.exchange([FIRST])
        assert await dead is None
        assert await alive == FIRST

    asyncio.run(play())


def test_a_pack_that_was_handed_to_the_dead_is_said_to_be_lost():
    """Between the death of a slot and its next start a pack was laid out, and went to the one that still seemed to
    wait. The slot comes again with empty hands."""

    async def play():
        desk = PackDesk()
        dead = await waiting(desk, "a")
        await desk.exchange([FIRST])
        assert await dead == FIRST, "and nobody hears the answer"
        alive = await waiting(desk, "a")
        assert kinds(await desk.exchange([SECOND])) == [("a", 1, "started"), ("a", 1, "lost")]
        assert await alive == SECOND

    asyncio.run(play())


def test_what_has_ended_is_not_lost():
    async def play():
        desk = PackDesk()
        await desk.exchange([FIRST, SECOND])
        for number in (1, 2):
            assert (await desk.take("a", "node", 0)).number == number
            await desk.report(Report("a", number, "progress"))
            await desk.report(Report("a", number, "ended" if number == 1 else "too large"))
        assert await desk.take("a", "node", 0) is None
        assert "lost" not in {report.kind for report in await desk.exchange([])}

    asyncio.run(play())


def test_what_a_dead_slot_had_come_for_goes_to_others():
    """It is not known to have died when it still seems to wait; once it is, nothing is handed to it."""

    async def play():
        desk = PackDesk()
        dead, alive = await waiting(desk, "dead"), await waiting(desk, "alive")
        await desk.forget(["dead"])
        await desk.exchange([FIRST])
        assert await dead is None
        assert await alive == FIRST

    asyncio.run(play())


def test_a_node_that_is_pardoned_gets_packs_again():
    async def play():
        desk = PackDesk()
        await desk.exchange([FIRST], blocked_nodes=["node"])
        assert await desk.take("a", "node", 0) is None
        await desk.exchange([], blocked_nodes=[])
        assert await desk.take("a", "node", 0) == FIRST

    asyncio.run(play())
