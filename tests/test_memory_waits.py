"""Trials that do not fit into a device's memory although they are alone in their pack."""

import pytest
from simulated_cluster import Cluster
from simulated_search import GD, drive, near, study

from orchestrator.execution import scheduler as scheduler_module
from orchestrator.execution.memory_waits import FEWER_FOR_S, MOST_WAIT_S, TRIES, WAIT_S
from orchestrator.execution.node_health import START_FAILURES
from orchestrator.execution.scheduler import GIVE_UP_AFTER, PREFER_OTHERS_S
from trainables.federation.messages import Failure

SLOTS = 7
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
    with Cluster(tmp_path, study(methods=[GD]), lanes=1) as cluster:
        number, (trial,) = cluster.take()
        for _ in range(TRIES - 1):
            does_not_fit(cluster, number, how=how)
            assert cluster.ledger.rows([trial.key]) == {}
            clock[0] += WAIT_S
            number, pack = cluster.take()
            assert pack == [trial]
        does_not_fit(cluster, number, how=how)
        row = cluster.ledger.rows([trial.key])[trial.key]
        assert (row.state, row.reason) == ("failed", REASON)
        assert [key for _, key, _ in cluster.ledger.failures()] == [trial.key] * TRIES


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


class SharedGpu:
    """Seven slots share a GPU. `fits`: whether a trial fits next to a number of others."""

    def __init__(self, clock, seconds, fits):
        self._clock, self._seconds, self._fits = clock, seconds, fits
        self.attempts = 0

    def run(self, cluster):
        running, failing = {}, {}
        while not cluster.scheduler.over:
            self._clock[0] += 5.0
            for slot, (end, number, _) in list(failing.items()):
                if end <= self._clock[0]:
                    del failing[slot]
                    does_not_fit(cluster, number, slot)
            for slot, (end, number, pack) in list(running.items()):
                if end <= self._clock[0]:
                    del running[slot]
                    cluster.complete(number, pack, near(0.3))
            for slot in [f"slot {index}" for index in range(SLOTS)]:
                if slot not in running.keys() | failing.keys() and (found := cluster.take(slot)):
                    self.attempts += 1
                    if self._fits(found[1][0], len(running)):
                        running[slot] = self._clock[0] + self._seconds, *found
                    else:
                        failing[slot] = self._clock[0] + 10.0, *found


@pytest.mark.parametrize(("fit", "seconds"), [(6, 20), (5, 60), (5, 900), (3, 120), (1, 20)])
def test_as_many_packs_run_as_fit(tmp_path, clock, fit, seconds):
    """No trial fails, the node is not blamed, and a failed attempt is rare."""
    gpu = SharedGpu(clock, seconds, lambda trial, others: others < fit)
    with Cluster(tmp_path, of_many(60), lanes=1, federations=SLOTS) as cluster:
        gpu.run(cluster)
        assert cluster.scheduler.sweep.finished
        assert cluster.ledger.failed() == {}
        assert cluster.scheduler.health.blocked == set()
        trials, periods = len(cluster.ledger.outcomes()), 1 + (clock[0] - 1000) / FEWER_FOR_S
        assert gpu.attempts - trials <= 2 * (SLOTS - fit) * periods
        assert clock[0] - 1000 <= 1.5 * trials / fit * seconds + MOST_WAIT_S


def test_trials_that_never_fit_do_not_harm_others(tmp_path, clock):
    """Although they, and some of the others, do not fit next to others. They fail at the end."""
    with Cluster(tmp_path, of_many(100), lanes=1, federations=SLOTS) as cluster:
        first = {trial.key for trial in list(cluster.scheduler.sweep.waiting.values())[3:6]}
        gpu = SharedGpu(clock, 60, lambda trial, others: others < 5 and trial.key not in first)
        gpu.run(cluster)
        assert cluster.scheduler.sweep.finished
        assert cluster.ledger.failed().keys() == first
        trials = len(cluster.ledger.outcomes())
        assert clock[0] - 1000 <= 1.5 * trials / 5 * 60 + len(first) * (TRIES * WAIT_S + 120)


def test_memory_that_is_short_for_a_while_costs_little(tmp_path, clock):
    """All packs run out of memory at once."""
    gpu = SharedGpu(clock, 60, lambda trial, others: clock[0] > 1030)
    with Cluster(tmp_path, of_many(100), lanes=1, federations=SLOTS) as cluster:
        gpu.run(cluster)
        assert cluster.ledger.failed() == {}
        trials = len(cluster.ledger.outcomes())
        assert clock[0] - 1000 <= 1.2 * trials / SLOTS * 60 + FEWER_FOR_S


def test_a_trial_does_not_wait_if_nothing_runs(tmp_path, clock):
    with Cluster(tmp_path, of_many(2), lanes=1, federations=2) as cluster:
        long = cluster.take("long")
        for _ in range(5):
            number, (trial,) = cluster.take()
            does_not_fit(cluster, number)
            clock[0] += MOST_WAIT_S
        number, _ = cluster.take()
        does_not_fit(cluster, number)
        clock[0] += FEWER_FOR_S
        assert cluster.take() is None
        cluster.complete(*long, near(0.3))
        assert cluster.take()[1] == [trial]


def test_short_packs_are_not_offered_in_advance_while_slots_stay_idle(tmp_path, clock):
    with Cluster(tmp_path, of_many(20), lanes=1, federations=4) as cluster:
        found = [cluster.take(f"slot {index}") for index in range(4)]
        does_not_fit(cluster, found[0][0])
        cluster.scheduler.queue.pace = 0.0
        assert cluster.take() is None
        clock[0] += FEWER_FOR_S
        assert cluster.take() is not None


def test_few_slots_of_a_large_cluster_stay_idle(tmp_path, clock):
    """At most as many as a node has, less one."""
    with Cluster(tmp_path, of_many(100), lanes=1, federations=32) as cluster:
        cluster.scheduler.health.update({}, [f"node {index}" for index in range(8)], set(), set())
        found = [cluster.take(f"slot {index}", f"node {index % 8}") for index in range(32)]
        for number, _ in found[::2]:
            does_not_fit(cluster, number)
        taken = list(iter(lambda: cluster.take(node="node 1"), None))
        assert len(taken) == 16 - 3


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
    """It is tried there before the trial fails. The study goes on while a pack runs, although more trials fail than
    would stop a study in which nothing works."""

    def kind(clip):
        return {"dp-fedgd": {"label": str(clip), "clip": clip, "coarse": {"learning_rate": [1]}}}

    with Cluster(tmp_path, study(methods=[kind(clip) for clip in range(1, 7)]), lanes=1, federations=8) as cluster:
        scheduler = cluster.scheduler
        scheduler.health.update({}, ["small", "large", "third"], set(), set())
        cluster.take("long", "third")
        for _ in range(GIVE_UP_AFTER + 1):
            number, (trial,) = cluster.take("slot", "small")
            for _ in range(TRIES - 1):
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
        waiting = []
        while found := cluster.take():
            waiting.append(found[1])
            does_not_fit(cluster, found[0])
        for _ in range(START_FAILURES + 1):
            cluster.scheduler.slot_failed("slot", Failure("killed", "out of memory", "node"))
        assert not cluster.scheduler.health.refused
        clock[0] += WAIT_S
        assert cluster.take()[1] in waiting
