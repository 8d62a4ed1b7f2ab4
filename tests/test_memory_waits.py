"""Trials that do not fit into a device's memory although they are alone in their pack."""

import pytest
from simulated_cluster import Cluster
from simulated_search import GD, drive, near, study

from orchestrator.execution import scheduler as scheduler_module
from orchestrator.execution.memory_waits import FEWER_FOR_S, TRIES, WAIT_S
from orchestrator.execution.node_health import START_FAILURES
from orchestrator.execution.scheduler import GIVE_UP_AFTER, PREFER_OTHERS_S
from trainables.federation.messages import Failure

REASON = "one lane does not fit into the device's memory"


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: now[0])
    return now


def of_many(trials: int):
    return study(methods=[{"dp-fedgd": {"coarse": {"learning_rate": [0.01 * (1 + k) for k in range(trials)]}}}])


def does_not_fit(cluster, number, slot="slot", how="reported"):
    if how == "reported":
        cluster.report(number, "too large", slot=slot, fits=0)
    else:
        cluster.scheduler.slot_failed(slot, Failure(REASON, "out of memory"))


@pytest.mark.parametrize("how", ["reported", "killed"])
def test_a_trial_that_never_fits_fails(tmp_path, clock, how):
    """Others like it are not tried again."""
    with Cluster(tmp_path, study(methods=[GD]), lanes=1) as cluster:
        number, (trial,) = cluster.take()
        for _ in range(TRIES - 1):
            does_not_fit(cluster, number, how=how)
            assert cluster.ledger.rows([trial.key]) == {}
            clock[0] += WAIT_S
            number, pack = cluster.take()
            assert pack == [trial]
        does_not_fit(cluster, number, how=how)
        number, (other,) = cluster.take()
        does_not_fit(cluster, number, how=how)
        for key in (trial.key, other.key):
            row = cluster.ledger.rows([key])[key]
            assert (row.state, row.reason) == ("failed", REASON)
        assert [key for _, key, _ in cluster.ledger.failures()] == [trial.key] * TRIES + [other.key]


@pytest.mark.parametrize("how", ["reported", "killed"])
def test_a_trial_waits_while_another_program_uses_the_memory(tmp_path, clock, how):
    """Other trials run meanwhile."""
    with Cluster(tmp_path, study(methods=[GD]), lanes=1) as cluster:
        number, (trial,) = cluster.take()
        does_not_fit(cluster, number, how=how)
        while found := cluster.take():
            assert found[1] != [trial]
            cluster.complete(*found, near(0.3))
        clock[0] += WAIT_S - 1
        assert cluster.take() is None
        clock[0] += 1
        found = cluster.take()
        assert found[1] == [trial]
        cluster.complete(*found, near(0.3))
        cluster.run(near(0.3))
        assert cluster.scheduler.sweep.finished
        assert cluster.ledger.stages() == drive(tmp_path / "plain", study(methods=[GD]), near(0.3)).stages


@pytest.mark.parametrize(("fit", "seconds"), [(6, 20), (5, 60), (5, 900), (3, 120), (1, 20)])
def test_as_many_packs_run_as_fit(tmp_path, clock, fit, seconds):
    """On seven slots that share a GPU. No trial fails, and the node is not blamed."""
    slots, attempts, running, failing = 7, 0, {}, {}
    with Cluster(tmp_path, of_many(60), lanes=1, federations=slots) as cluster:
        while not cluster.scheduler.over:
            clock[0] += 5.0
            for slot, (end, number, _) in list(failing.items()):
                if end <= clock[0]:
                    del failing[slot]
                    does_not_fit(cluster, number, slot)
            for slot, (end, number, pack) in list(running.items()):
                if end <= clock[0]:
                    del running[slot]
                    cluster.complete(number, pack, near(0.3))
            for slot in {f"slot {index}" for index in range(slots)} - running.keys() - failing.keys():
                if found := cluster.take(slot):
                    attempts += 1
                    if len(running) < fit:
                        running[slot] = clock[0] + seconds, *found
                    else:
                        failing[slot] = clock[0] + 10.0, *found
        assert cluster.scheduler.sweep.finished
        assert cluster.ledger.failed() == {}
        assert cluster.scheduler.health.blocked == set()
        trials = len(cluster.ledger.outcomes())
        periods = 1 + (clock[0] - 1000) // FEWER_FOR_S
        assert attempts - trials <= 3 * (slots - fit) * periods


def start(cluster, trial, node):
    """A slot on this node takes the offer of this trial; its number."""
    cluster.offer()
    offers = [order for order in cluster.desk if order.number not in cluster.scheduler.superseded]
    (order,) = [order for order in offers if order.trials == [trial]]
    assert node not in order.not_on
    cluster.desk.remove(order)
    cluster.report(order.number, "started", nodes=(node,))
    return order.number


def test_another_node_may_have_more_memory(tmp_path, clock):
    """It is tried there before the trial fails; after one has failed, others like it are tried once on each of the two.
    The study goes on while a pack runs, although more trials fail than stop a study in which nothing works."""
    kinds = [{"dp-fedgd": {"label": str(clip), "clip": clip, "coarse": {"learning_rate": [1]}}} for clip in range(1, 7)]
    with Cluster(tmp_path, study(methods=kinds), lanes=1, federations=8) as cluster:
        scheduler = cluster.scheduler
        scheduler.health.update({}, ["small", "large", "third"], set(), set())
        cluster.take("long", "third")
        for tries in [TRIES, *[1] * GIVE_UP_AFTER]:
            number, (trial,) = cluster.take("slot", "small")
            for _ in range(tries - 1):
                does_not_fit(cluster, number)
                clock[0] += WAIT_S
                cluster.offer()
                clock[0] += PREFER_OTHERS_S
                number = start(cluster, trial, "small")
            does_not_fit(cluster, number)
            assert cluster.ledger.rows([trial.key]) == {}
            clock[0] += WAIT_S
            cluster.offer()
            clock[0] += 10 * PREFER_OTHERS_S
            cluster.offer()
            assert all("small" in order.not_on for order in cluster.desk if order.trials == [trial])
            does_not_fit(cluster, start(cluster, trial, "large"))
            assert cluster.ledger.rows([trial.key])[trial.key].state == "failed"
        assert not scheduler.stopping
        assert not scheduler.health.blocked


def test_a_federation_that_is_killed_while_its_trial_waits_is_started_again(tmp_path, clock):
    with Cluster(tmp_path, study(methods=[GD]), lanes=1) as cluster:
        cluster.scheduler.health.update({}, ["node"], set(), set())
        found = cluster.take()
        while found:
            waiting = found[1]
            does_not_fit(cluster, found[0])
            found = cluster.take()
        for _ in range(START_FAILURES + 1):
            cluster.scheduler.slot_failed("slot", Failure("killed", "out of memory", "node"))
        assert not cluster.scheduler.health.refused
        clock[0] += WAIT_S
        assert waiting in [pack for _, pack in iter(cluster.take, None)] or cluster.scheduler.queue.packs
