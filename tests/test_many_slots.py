"""What a pack costs the driver does not depend on the number of slots, cells or checkpoints."""

import asyncio
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from operations import operations
from simulated_cluster import Cluster
from simulated_search import GD, drive, near, study

from benchmarks import slots
from orchestrator.execution import scheduler as scheduler_module
from orchestrator.execution.cell_search import CellSearch
from orchestrator.execution.progress import progress_table
from orchestrator.results import counts
from orchestrator.results.ledger import Ledger
from orchestrator.study.cell_id import CellId
from trainables.federation.checkpoints import checkpoint_name
from trainables.federation.messages import Failure, Order, Report
from trainables.ray_actors.desk import PackDesk

FEW, MANY = 8, 40
CELL_ID = CellId("data", "iid", "dp-fedgd", 1.0)


def busy(folder: Path, count: int) -> Cluster:
    """Every slot runs a pack that has a checkpoint, on its own node; more packs wait. They take a minute each."""
    cluster = Cluster(folder / str(count), slots.study(count, 3), lanes=1, federations=count)
    cluster.scheduler.queue.pace = 60 / cluster.scheduler.queue.packs[0].work
    cluster.scheduler.queue.measure = lambda pack, seconds: None
    for number in range(count):
        slot = f"slot {number}"
        attempt, trials = cluster.take(slot, slot)
        saved = checkpoint_name([trial.key for trial in trials])
        cluster.report(attempt, "progress", slot, round=1, running=1, checkpoint=saved)
    return cluster


def ends(cluster: Cluster) -> None:
    """A pack ends, and its slot takes the next."""
    number, pack = next(iter(cluster.scheduler.in_flight.items()))
    cluster.complete(number, pack.trials, near(0.02))
    cluster.take(pack.slot, pack.node)


def ends_after_its_copy(cluster: Cluster) -> None:
    """A pack was copied, its original fails, and the copy ends."""
    scheduler = cluster.scheduler
    pack = next(iter(scheduler.in_flight.values()))
    copy = scheduler.queue.pack(pack.trials)
    copy.is_copied = pack.is_copied = True
    order = scheduler._offer(copy, avoid=[pack.node])
    cluster.report(order.number, "started", slot="other", nodes=("other",))
    scheduler.slot_failed(pack.slot, Failure("died"))
    cluster.complete(order.number, pack.trials, near(0.02))


def fails(cluster: Cluster) -> None:
    """A pack fails and goes to another node."""
    pack = next(iter(cluster.scheduler.in_flight.values()))
    cluster.scheduler.slot_failed(pack.slot, Failure("died"))
    cluster.take("other", "other")


def waits_for_another_node(cluster: Cluster) -> None:
    """Offers are checked again and again while packs wait."""
    fails(cluster)
    for _ in range(3):
        cluster.offer()


@pytest.mark.parametrize("event", [ends, ends_after_its_copy, fails, waits_for_another_node], ids=lambda e: e.__name__)
def test_what_a_pack_costs_does_not_depend_on_the_number_of_slots(tmp_path, event):
    costs = []
    for count in (FEW, MANY):
        with busy(tmp_path, count) as cluster:
            event(cluster)  # what happens once
            costs.append(operations(lambda of=cluster: event(of)))
    assert costs[1] < 1.2 * costs[0], costs


def test_offers_that_wait_are_not_counted_again(tmp_path):
    """Short packs are offered before a slot is free, so there are as many offers as slots."""
    costs = []
    for count in (FEW, MANY):
        with busy(tmp_path, count) as cluster:
            cluster.scheduler.queue.pace = 1e-9
            cluster.offer()
            assert len(cluster.scheduler.offered) == count
            costs.append(operations(cluster.scheduler.next_orders))
    assert costs[1] < 1.2 * costs[0], costs


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: now[0])
    return now


def test_all_packs_in_flight_are_compared_less_often_the_more_there_are(tmp_path, monkeypatch, clock):
    """With idle slots the driver looks for packs to split or to copy, otherwise at every exchange with the desk."""
    with busy(tmp_path, 4) as cluster:
        monkeypatch.setattr(scheduler_module, "COMPARE_EVERY_S", 2.0)
        scheduler, compared = cluster.scheduler, []
        waiting = scheduler.queue.packs[0]
        scheduler.queue.capacity = replace(scheduler.queue.capacity, federations=1000)
        scheduler.queue.balance = lambda *packs: compared.append("to split")
        scheduler._copies = lambda count: compared.append("to copy") or []
        for number in range(5, 300):
            scheduler.in_flight[number] = next(iter(scheduler.in_flight.values()))
        for later, found in ((10.0, 2), (3.9, 2), (0.2, 4)):
            clock[0] += later
            scheduler.queue.packs = [waiting]
            scheduler.next_orders()
            assert len(compared) == found


@pytest.mark.parametrize("at_once", [True, False])
def test_packs_that_come_back_are_split_for_idle_slots(tmp_path, clock, at_once):
    """However many packs are in flight, and however often the driver has looked before."""
    slots_in_all, lanes = 150, 64
    with Cluster(tmp_path, slots.study(slots_in_all * lanes, 1), lanes=lanes, federations=slots_in_all) as cluster:
        scheduler = cluster.scheduler
        scheduler.queue.pace = 60 / scheduler.queue.packs[0].work
        for number in range(slots_in_all):
            cluster.take(f"slot {number}", f"node {number // 8}")
        scheduler.queue.packs = []
        for number in list(scheduler.in_flight)[110:]:
            del scheduler.in_flight[number]  # they have ended, and nothing more is open
        clock[0] += 50
        for _ in range(4):
            clock[0] += 0.02
            assert scheduler.next_orders() == []
        orders = []
        for number in list(scheduler.in_flight)[:8]:
            cluster.report(number, "handed back", scheduler.in_flight[number].slot, round=0)
            if not at_once:
                clock[0] += 0.02
                orders += scheduler.next_orders()
        clock[0] += 0.02 if at_once else 1.0
        orders += scheduler.next_orders()
        assert max(len(order.trials) for order in orders) < lanes
        assert sum(len(order.trials) for order in orders) == 8 * lanes


def test_a_small_terminal_shows_the_cells_that_run(tmp_path):
    with busy(tmp_path, 4) as cluster:
        sweep = cluster.scheduler.sweep
        first, *others = sweep.searches
        sweep._left[id(first)] = 0
        names = [search.name for search in others[:2]]
        table = progress_table(sweep, rows=3)
        assert [str(cell) for cell in table.columns[0].cells] == [*names, f"… and {len(others) - 1} other searches"]
        assert progress_table(sweep, rows=len(sweep.searches)).row_count == len(sweep.searches)


# ---- the desk


def played(count: int, *, slots_wait: bool) -> int:
    """What the desk does while a slot ends its pack and takes the next. `slots_wait`: slots wait, and the packs are not
    for their nodes; otherwise packs wait."""

    async def play() -> int:
        desk, waiting, packs = PackDesk(), count if slots_wait else 0, 2 if slots_wait else count
        others = [asyncio.ensure_future(desk.take(f"slot {n}", ["slow"], 60)) for n in range(waiting)]
        await asyncio.sleep(0)
        await desk.exchange([Order(n, b"trials", not_on=("slow",) * slots_wait) for n in range(packs)])
        await desk.exchange([], blocked_nodes=["blocked"])
        first = await desk.take("mine", ["node"], 0)

        def step() -> None:
            for call in (
                desk.alive("mine", ["node"]),
                desk.take("mine", ["node"], 0, last=Report("mine", first.number, "ended")),
                desk.exchange([], blocked_nodes=["blocked"]),
            ):
                with pytest.raises(StopIteration):  # none of them waits
                    call.send(None)

        desk._paced = float("inf")  # slots are counted every second, not here
        cost = operations(step)
        for other in others:
            other.cancel()
        return cost

    return asyncio.run(play())


@pytest.mark.parametrize("slots_wait", [False, True])
def test_what_a_pack_costs_the_desk_does_not_depend_on_what_waits(slots_wait):
    costs = [played(count, slots_wait=slots_wait) for count in (FEW, MANY)]
    assert costs[1] < 1.2 * costs[0], costs


def test_the_desk_forgets_packs_that_no_slot_has():
    async def play():
        desk = PackDesk()
        await desk.exchange([Order(number, b"trials") for number in range(6)])
        for slot in ("a", "b", "c"):
            await desk.take(slot, ["node"], 0)
        await desk.exchange([], superseded=range(100))
        assert desk._superseded == {0, 1, 2}
        await desk.take("a", ["node"], 0, last=Report("a", 0, "dropped"))
        await desk.take("b", ["node"], 0, last=Report("b", 1, "ended"))
        assert await desk.take("c", ["node"], 0) is None  # its process had died
        assert not desk._superseded

    asyncio.run(play())


# ---- cells


def test_the_secret_of_a_cell_is_read_alone(tmp_path):
    costs = []
    for count in (FEW, MANY):
        with Ledger.write(tmp_path / str(count)) as ledger:
            ledger.add_secrets({CELL_ID._replace(epsilon=float(n)): bytes([n]) * 32 for n in range(1, count)}, "")
            costs.append(operations(lambda ledger=ledger: ledger.secret(CELL_ID._replace(epsilon=100.0), "")))
    assert costs[0] == costs[1]


def test_a_secret_that_waits_for_a_later_cell_is_refused(tmp_path):
    """Someone who knows it has written it into the ledger."""
    with Ledger.write(tmp_path) as ledger:
        ledger._db.execute("INSERT INTO secrets VALUES (1, ?, x'')", (bytes(32),))
        with pytest.raises(sqlite3.DataError, match="which does not exist"):
            ledger.secret(CELL_ID, "")


def test_searches_that_wait_for_their_neighbours_are_not_asked_for_every_pack(tmp_path, monkeypatch):
    asked: Counter[str] = Counter()
    next_stage = CellSearch.next_stage

    def asking(self: CellSearch):
        asked[self.name] += 1
        return next_stage(self)

    monkeypatch.setattr(CellSearch, "next_stage", asking)
    search = {"warm_start": True, "finalists": 2}
    of = study(methods=[GD], epsilons=[1, 2, 4, 8], seeds={"contest": [11], "confirm": [21]}, search=search)
    assert drive(tmp_path, of, near(0.3), batch=1).finished
    assert len(asked) == 4
    assert max(asked.values()) <= 7, "five answers, and one more for each neighbour"


def test_a_stage_that_is_removed_alone_is_not_counted_with_all_others(tmp_path, monkeypatch):
    """As for every cell of a method whose plug-in has changed."""
    drive(tmp_path, study(methods=[GD]), near(0.3))
    monkeypatch.setattr(counts, "recount", None)
    with Ledger.write(tmp_path) as ledger:
        (cell, strategy, _) = next(iter(ledger.stages()))
        for stage, position in (("confirm", 1), ("fine", 1), ("fine", 0), ("coarse", 0)):
            ledger.forget((), {(cell, strategy, stage): position})
            assert ledger.counts_are_right()
        assert len(ledger.stages()[cell, strategy, "confirm"]) == 1
