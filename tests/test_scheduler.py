"""The scheduler on a simulated cluster: which pack runs next, and what follows from failures."""

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import small
from simulated_cluster import Cluster, lane_result
from simulated_search import GD, drive, near, study

from benchmarks import slots
from orchestrator.execution import scheduler as scheduler_module
from orchestrator.execution.node_health import START_FAILURES
from orchestrator.execution.pack_queue import PackQueue
from orchestrator.execution.packing import Capacity
from orchestrator.execution.scheduler import GIVE_UP_AFTER, LOST_WITH_NODES, PREFER_OTHERS_S
from orchestrator.execution.sweep import Sweep
from orchestrator.results import status
from orchestrator.results.ledger import Ledger
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.study import Study
from trainables.federation.checkpoints import PackStorage, checkpoint_name
from trainables.federation.federation_size import FederationSize
from trainables.federation.messages import Failure, Report


@pytest.mark.parametrize("lanes", [1, 2, 16, 128])
def test_results_do_not_depend_on_the_size_of_packs(tmp_path, lanes):
    with Cluster(tmp_path / "packs", study(), lanes) as cluster:
        sizes = cluster.run(near(0.3))
        assert max(sizes) <= lanes
        assert cluster.scheduler.sweep.finished
        assert cluster.ledger.stages() == drive(tmp_path / "plain", study(), near(0.3)).stages


@pytest.mark.parametrize("how", ["reported", "killed"])
def test_a_pack_that_runs_out_of_memory_late_resumes_in_parts(tmp_path, how):
    """Memory may run out hours after a pack started."""
    with Cluster(tmp_path, study(methods=[GD]), lanes=4) as cluster:
        number, pack = cluster.take()
        saved = checkpoint_name([trial.key for trial in pack])
        cluster.report(number, "progress", round=2, running=len(pack), checkpoint=saved)
        if how == "reported":
            cluster.report(number, "too large", fits=1)
        else:
            cluster.scheduler.slot_failed("slot", Failure("killed", "out of memory"))
        mine = {trial.key for trial in pack}
        cluster.scheduler.queue.resize(len(pack))  # as many slots as parts: all are offered
        cluster.offer()
        parts = [order for order in cluster.desk if {trial.key for trial in order.trials} <= mine]
        assert len(parts) > 1
        assert {order.resume_from for order in parts} == {saved}


def test_lost_nodes_do_not_count_as_failed_attempts(tmp_path):
    """Ray first reports that an actor does not answer, and only later that its node is lost."""
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        size = len(cluster.take(node="spot 0")[1])
        for lost in range(6):
            cluster.scheduler.slot_failed("slot", Failure("The actor is unavailable: Socket closed"))
            cluster.scheduler.health.lost.add(f"spot {lost}")
            assert len(cluster.take(node=f"spot {lost + 1}")[1]) == size, "not split"
        for _ in range(3):  # the last node is alive, and fails the pack
            cluster.scheduler.slot_failed("slot", Failure("died"))
            found = cluster.take(node="spot 6")
        assert len(found[1]) < size


def test_packs_that_do_not_fit_into_memory_are_made_smaller(tmp_path):
    """So are waiting packs of the same group, and no others; trials and results do not change."""
    with Cluster(tmp_path / "small", study(), lanes=128) as cluster:
        sizes = []
        while found := cluster.take():
            number, pack = found
            sizes.append(len(pack))
            if len(pack) > 2:
                cluster.report(number, "too large", fits=2)
            else:
                cluster.complete(number, pack, near(0.3))
        assert max(sizes) > 2, "some did not fit"
        assert cluster.scheduler.sweep.finished
        assert cluster.ledger.failures() == []
        assert cluster.ledger.stages() == drive(tmp_path / "plain", study(), near(0.3)).stages


def test_a_new_driver_knows_what_did_not_fit_into_memory(tmp_path):
    """On the same kind of device."""
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        number, pack = cluster.take()
        assert len(pack) == 3
        cluster.report(number, "too large", fits=2)
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        assert len(cluster.take()[1]) == 2
    with Ledger.write(tmp_path) as ledger:
        assert ledger.memory_limits("another device") == {}


def test_the_fine_stage_waits_for_all_coarse_trials(tmp_path):
    """Three coarse trials, a pack each, on two federations: one pack is offered while two run."""
    with Cluster(tmp_path, study(methods=[GD]), lanes=1, federations=2) as cluster:
        cluster.scheduler.queue.pace = 0.0  # short packs
        first, second, third = (cluster.take() for _ in range(3))
        assert cluster.take() is None
        cluster.complete(*first, near(0.3))
        cluster.complete(*third, near(0.3))
        assert cluster.take() is None, "the fine stage waits for the last coarse trial"
        cluster.complete(*second, near(0.3))
        assert cluster.run(near(0.3)) == [1] * (3 + 2)
        assert cluster.scheduler.over


def test_at_most_one_pack_per_slot_is_offered(tmp_path):
    """Short packs in advance, so that no slot waits for the driver; long ones only to idle slots, because they can be
    split until then."""
    with Cluster(tmp_path, study(), lanes=1, federations=2) as cluster:
        cluster.offer()
        assert len(cluster.desk) == 2
        cluster.offer()
        assert len(cluster.desk) == 2
        cluster.take()
        cluster.offer()
        assert len(cluster.desk) == 1, "the duration is not known yet"
        cluster.scheduler.queue.pace = 0.0
        cluster.offer()
        assert len(cluster.desk) == 2


def test_the_longest_packs_come_first(tmp_path):
    """Five times the local steps are five times the work. The order of methods in the study does not matter."""
    grid = {"client_learning_rate": [0.1, 0.2]}
    long = {"name": "dp-fedavg", "fixed": {"local_steps": 5}, "coarse": grid, "fine": grid}
    with Cluster(tmp_path, study(methods=[GD, long]), lanes=1) as cluster:
        _, (trial,) = cluster.take()
        assert trial.method == "dp-fedavg"


def test_networks_of_the_same_problem_follow_one_another():
    """Their rows at the cut are computed again when the problem changes. Longer ones come first; heads after them."""
    queue = PackQueue(Capacity(FederationSize(1), 1, 1), rows_of=lambda key: 100)
    heads = small.problem().spec
    problems = [heads.model_copy(update={"model": f"network:n,cut={cut}"}) for cut in ("1", "2")]
    some = [
        small.trial(small.problem(), "dp-fedgd", rounds=rounds).model_copy(update={"problem": problem})
        for rounds in (5, 20, 10)
        for problem in (*problems, heads)
    ]
    queue.add(some)
    order = [(pack.trials[0].problem.model, pack.trials[0].rounds) for pack in queue.packs]
    assert order[6:] == [("softmax", 20), ("softmax", 10), ("softmax", 5)]
    assert [rounds for _, rounds in order[:6]] == [20, 10, 5] * 2
    assert len({model for model, _ in order[:3]}) == len({model for model, _ in order[3:6]}) == 1


def test_packs_that_a_stage_waits_for_come_before_confirm_runs(tmp_path):
    """Four cells, three waves of packs a stage and one to confirm, all of one length: no slot is ever idle, which
    it would be in the last if some cells were confirmed before others have searched."""
    with Cluster(tmp_path, slots.study(8, 3), lanes=1, federations=8) as cluster:
        waves = []
        while wave := [found for _ in range(8) if (found := cluster.take()) is not None]:
            for number, trials in wave:
                cluster.complete(number, trials, near(0.02))
            waves.append(len(wave))
        assert waves == [8] * 7


def test_cells_do_not_wait_for_one_another(tmp_path):
    """The fine stage of the quick cell starts while the last coarse pack of the other still runs."""
    with Cluster(tmp_path, study(), lanes=1, federations=3) as cluster:
        cluster.scheduler.queue.pace = 0.0
        held = next(found for found in iter(cluster.take, None) if found[1][0].method == "dp-fedsofim")
        cells = []
        while len(cluster.scheduler.in_flight) > 1 or cluster.desk:
            for number, pack in list(cluster.scheduler.in_flight.items()):
                if number != held[0]:
                    cluster.complete(number, pack.trials, near(0.3))
            while found := cluster.take():
                cells.append((found[1][0].method, found[1][0].rounds))
        assert ("dp-fedgd", 6) in cells, "including its confirm runs"
        assert ("dp-fedsofim", 6) not in cells


def of_many(trials: int) -> Study:
    """One cell with this many coarse trials."""
    axis = [0.001 * (k + 1) for k in range(trials)]
    return study(methods=[{"name": "dp-fedgd", "coarse": {"learning_rate": axis}, "fine": {"learning_rate": [0.1]}}])


def test_waiting_packs_are_split_for_idle_slots(tmp_path):
    """Into whole blocks of 16 lanes, and only if the pack takes long enough."""
    with Cluster(tmp_path / "four", of_many(64), federations=4) as cluster:
        cluster.scheduler.queue.resize(1)
        assert [len(pack) for pack in cluster.scheduler.queue.packs] == [64], "packed for one slot"
        cluster.scheduler.queue.capacity = Capacity(FederationSize(), 4, 128)
        cluster.offer()
        assert [len(order.trials) for order in cluster.desk] == [16] * 4
    with Cluster(tmp_path / "quick", of_many(64)) as cluster:
        cluster.scheduler.queue.pace = 0.0  # similar packs took no time
        cluster.scheduler.queue.capacity = Capacity(FederationSize(), 3, 128)
        cluster.offer()
        assert len(cluster.desk) == 1, "splitting is not worthwhile"


def test_the_last_packs_are_split_so_that_all_slots_end_together(tmp_path):
    """Seven packs of a hundred seconds on four slots: without a cut the last three would leave a slot idle. What
    is cut a second time ends no sooner, so it is not."""
    with Cluster(tmp_path, of_many(7 * 64), lanes=64, federations=4) as cluster:
        cluster.scheduler.queue.pace = 100 / cluster.scheduler.queue.packs[0].work
        for n in range(4):
            assert len(cluster.take(f"slot {n}")[1]) == 64
        assert cluster.take() is None, "long packs are not offered in advance"
        lengths = []
        for _ in range(3):  # waves
            wave, pace = list(cluster.scheduler.in_flight.items()), cluster.scheduler.queue.pace
            for _, pack in wave:
                pack.began -= 100 * len(pack) / 64
            for number, pack in wave:
                cluster.complete(number, pack.trials, near(0.3))
                cluster.scheduler.queue.pace = pace  # by the test's clock
                if found := cluster.take(pack.slot):
                    lengths.append(len(found[1]))
        assert lengths == [16] * 12, "three quarters of a pack for each slot"


def test_more_slots_can_be_used_if_waiting_packs_can_be_split(tmp_path):
    with Cluster(tmp_path, of_many(128), lanes=64, federations=1) as cluster:
        cluster.take()
        assert len(cluster.scheduler.queue.packs) == 1, "a pack of 64: four blocks of lanes"
        assert [cluster.scheduler.can_use(slots) for slots in (1, 5, 6)] == [True, True, False]
        cluster.scheduler.queue.pace = 0.0
        assert [cluster.scheduler.can_use(slots) for slots in (2, 3)] == [True, False], "short packs are not split"


def test_when_gpus_join_packs_in_flight_end_and_no_other_starts(tmp_path):
    with Cluster(tmp_path, study(), lanes=2) as cluster:
        found = cluster.take()
        cluster.offer()
        cluster.scheduler.moving_to_gpus = True
        cluster.scheduler.withdraw([order.number for order in cluster.desk])
        cluster.desk.clear()
        assert cluster.take() is None
        assert not cluster.scheduler.over
        cluster.complete(*found, near(0.3))
        assert cluster.scheduler.over
        assert not cluster.scheduler.sweep.finished


def test_waiting_trials_are_packed_again_for_nodes_that_join(tmp_path):
    with Cluster(tmp_path, of_many(96), lanes=48) as cluster:
        _, pack = cluster.take()
        assert len(pack) == 48
        cluster.scheduler.queue.resize(3)
        assert [len(pack) for pack in cluster.scheduler.queue.packs] == [16, 16, 16]
        cluster.offer()
        assert len(cluster.desk) == 2, "for the two new slots"


def test_nothing_starts_after_one_ctrl_c(tmp_path):
    with Cluster(tmp_path, study(), lanes=2, federations=2) as cluster:
        first, second = cluster.take(), cluster.take()
        cluster.offer()
        cluster.scheduler.stopping = True
        cluster.scheduler.withdraw([order.number for order in cluster.desk])
        cluster.desk.clear()
        assert cluster.take() is None
        cluster.complete(*first, near(0.3))
        assert not cluster.scheduler.over
        cluster.complete(*second, near(0.3))
        assert cluster.scheduler.over
        assert len(cluster.ledger.outcomes()) == 4, "results of the packs in flight are recorded"


def test_a_failing_pack_is_split_until_the_failing_trial_is_alone(tmp_path):
    def is_faulty(pack) -> bool:
        return any(t.hyperparameters["learning_rate"] == 0.1 and t.method == "dp-fedsofim" for t in pack)

    with Cluster(tmp_path, study()) as cluster:
        sizes = cluster.run(near(0.3), is_faulty)
        assert sizes[:4] == [7, 7, 7, 3], "three attempts, then halves"
        assert cluster.scheduler.sweep.finished
        states = Counter(state for state, _, _ in cluster.ledger.outcomes().values())
        assert states["failed"] == 2, "learning rate 0.1 with either rho"
        failed = [key for key, (state, _, _) in cluster.ledger.outcomes().items() if state == "failed"]
        assert {r.reason for r in cluster.ledger.rows(failed).values()} == {"RuntimeError: on purpose"}
        assert cluster.ledger.failures()[0][0] == 7, "first the whole pack"
    found = status.read(tmp_path)
    assert found["finished"]
    assert set(found["failed"]) == set(failed)
    assert "failed: trial" in status.as_text(found)


def test_status_shows_a_traceback_line_by_line(tmp_path):
    """And no control characters."""
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        cluster.run(
            near(0.3),
            lambda pack: any(trial.hyperparameters["learning_rate"] == 0.1 for trial in pack),
            "ValueError: no gradient\n  File a.py, line 7\n\x1b[2J",
        )
    assert ": ValueError: no gradient\n      File a.py, line 7\n     [2J" in status.as_text(status.read(tmp_path))


def test_if_nothing_can_run_the_sweep_stops_and_no_trial_is_blamed(tmp_path):
    with Cluster(tmp_path, study()) as cluster:
        cluster.run(near(0.3), lambda pack: True)
        assert cluster.scheduler.fatal_error == "RuntimeError: on purpose"
        assert not cluster.scheduler.sweep.finished
        assert len(cluster.ledger.outcomes()) < GIVE_UP_AFTER
    assert drive(tmp_path, study(), near(0.3)).finished, "once the cause is fixed"


def test_if_any_pack_succeeds_the_sweep_does_not_stop(tmp_path):
    """All trials of one method fail, but those of the other succeed: the environment is not at fault."""
    with Cluster(tmp_path, study(), lanes=1) as cluster:
        cluster.run(near(0.3), lambda pack: pack[0].method == "dp-fedsofim")
        assert not cluster.scheduler.fatal_error
        assert cluster.scheduler.sweep.finished
        states = Counter(state for state, _, _ in cluster.ledger.outcomes().values())
        assert states["failed"] == 4 > GIVE_UP_AFTER


def test_progress_counts_rounds_of_single_trials(tmp_path):
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        number, pack = cluster.take()
        cluster.report(number, "progress", round=2, running=3, computing_s=1.0)
        assert cluster.scheduler.lane_rounds == 3 * 2
        assert cluster.scheduler.computing_s == 1.0
        cluster.scheduler.slot_failed("slot", Failure("died"))
        number, pack = cluster.take()
        cluster.report(number, "progress", round=1, running=3, computing_s=0.5)
        cluster.report(number, "progress", round=2, running=3, computing_s=1.0)
        cluster.scheduler.slot_failed("slot", Failure("died"))
        cluster.take()
        cluster.scheduler.slot_failed("slot", Failure("its node has died before the first round", "node died"))
        assert cluster.scheduler.repeated_rounds == 2 + 2
        number, pack = cluster.take()
        cluster.complete(number, pack, near(0.3))
        assert cluster.scheduler.lane_rounds == 3 * 4, "repeated rounds count once"


# ---- failures


def test_a_failed_slot_counts_as_an_attempt_and_a_lost_node_does_not(tmp_path):
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        for _ in range(5):
            cluster.take()
            cluster.scheduler.slot_failed("slot", Failure("its node has died", "node died"))
        assert cluster.scheduler.retries == 5
        fails = iter([True, True])
        assert cluster.run(near(0.3), lambda pack: next(fails, False))[:3] == [3, 3, 3]
        assert cluster.scheduler.sweep.finished
        assert len(cluster.ledger.failures()) == 5 + 2


def test_a_pack_that_never_reached_its_slot_is_offered_again(tmp_path):
    """The slot died without a pack; then the desk, which did not know, handed it one."""
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        cluster.scheduler.slot_failed("slot", Failure("killed"))
        number, pack = cluster.take()
        cluster.report(number, "lost")
        assert cluster.scheduler.in_flight == {}
        cluster.report(number, "lost")  # ignored: no longer in flight
        again, same = cluster.take()
        assert same == pack
        cluster.complete(again, pack, near(0.3))
        cluster.run(near(0.3))
        assert cluster.scheduler.sweep.finished
        assert cluster.ledger.failures() == []


def test_reports_of_a_slot_that_was_given_up_are_ignored(tmp_path):
    """Another slot runs its pack."""
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        number, pack = cluster.take("lost")
        cluster.scheduler.slot_failed("lost", Failure("not heard of"))
        again, same = cluster.take("other")
        assert again != number
        assert same == pack
        cluster.complete(number, pack, near(0.9))
        assert cluster.ledger.outcomes() == {}
        cluster.complete(again, pack, near(0.3))
        assert len(cluster.ledger.outcomes()) == 3


def test_slots_that_do_not_start_fail_no_trial(tmp_path):
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        scheduler = cluster.scheduler
        scheduler.health.update({"id": "10.0.0.7"}, ["id"], set(), set())
        cluster.offer()
        for _ in range(START_FAILURES):
            assert not scheduler.stopping
            scheduler.slot_failed("slot", Failure("no compiler", node="id"))
            scheduler.stop_if_no_node_is_left()
        assert scheduler.fatal_error == "on node 10.0.0.7 no slot starts: no compiler"
        assert scheduler.over
        assert cluster.ledger.outcomes() == {}


@pytest.mark.parametrize("other", ["starting", "working"])
def test_a_node_where_nothing_starts_does_not_end_the_study(tmp_path, other):
    """A full disk on one node, while the other one takes long to start or has a pack."""
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        scheduler, found = cluster.scheduler, None
        scheduler.health.update({}, ["full", "sound"], set(), set())
        if other == "working":
            found = cluster.take("slot", "sound")
        for _ in range(20):
            scheduler.slot_failed("another", Failure("no space left on device", node="full"))
            scheduler.stop_if_no_node_is_left()
        assert scheduler.health.blocked == {"full"}
        assert not scheduler.stopping
        number, pack = found or cluster.take("slot", "sound")
        cluster.complete(number, pack, near(0.3))
        cluster.run(near(0.3))
        assert scheduler.sweep.finished


def test_starts_that_fail_on_unknown_nodes_count_against_all(tmp_path):
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        scheduler = cluster.scheduler
        scheduler.health.update({}, ["a", "b"], set(), set())
        for _ in range(2 * START_FAILURES):
            scheduler.stop_if_no_node_is_left()
            assert not scheduler.stopping
            scheduler.slot_failed("slot", Failure("the process ended"))
        scheduler.stop_if_no_node_is_left()
        assert scheduler.fatal_error == "no slot starts on any node: the process ended"


@pytest.mark.parametrize("other", ["starting", "working", "failed once"])
def test_a_node_whose_rounds_fail_does_not_end_the_study(tmp_path, other, monkeypatch):
    """It fails every pack, while the other node is not ready yet, or has its first pack."""
    now = [1000.0]
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: now[0])
    with Cluster(tmp_path, study(methods=[GD]), lanes=1, federations=2) as cluster:
        scheduler, found = cluster.scheduler, None
        scheduler.health.update({}, ["bad", "sound"], set(), set())
        if other == "failed once":
            scheduler.health.pack_failed("sound", 1000, others_work=False)
        if other != "starting":
            found = cluster.take("slot", "sound")
        attempts = 0
        for _ in range(20):
            now[0] += 10
            if cluster.take("another", "bad"):
                attempts += 1
                scheduler.slot_failed("another", Failure("a dead mount"))
        assert 3 * 2 <= attempts <= 3 * 3, "three attempts at each pack that it can take"
        assert not scheduler.stopping
        assert cluster.ledger.outcomes() == {}, "no trial is blamed"
        if found:
            cluster.complete(*found, near(0.3))
        while found := cluster.take("slot", "sound"):
            cluster.complete(*found, near(0.3))
        assert scheduler.sweep.finished
        assert not scheduler.fatal_error


def test_a_failed_pack_is_offered_to_another_node_first(tmp_path, monkeypatch):
    """For a while; meanwhile its node gets other packs."""
    now = [1000.0]
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: now[0])
    with Cluster(tmp_path, study(methods=[GD]), lanes=1, federations=2) as cluster:
        cluster.take("other", "busy")
        _, failed = cluster.take("slot", "node")
        cluster.scheduler.slot_failed("slot", Failure("died"))
        _, another = cluster.take("slot", "node")
        assert another != failed
        assert cluster.take("slot", "node") is None
        now[0] += PREFER_OTHERS_S
        assert cluster.take("slot", "node")[1] == failed
    with Cluster(tmp_path / "idle", study(methods=[GD])) as cluster:
        cluster.scheduler.health.update({}, ["node", "idle"], set(), set())
        _, failed = cluster.take("slot", "node")
        cluster.scheduler.slot_failed("slot", Failure("died"))
        assert cluster.take("other", "idle")[1] == failed


def test_if_packs_fail_on_all_nodes_the_sweep_stops(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: now[0])
    with Cluster(tmp_path, study(methods=[GD]), lanes=1, federations=2) as cluster:
        cluster.scheduler.health.update({}, ["a", "b"], set(), set())
        while not cluster.scheduler.stopping and now[0] < 2000:
            now[0] += 10
            taken = [node for node in ("a", "b") if cluster.take(node, node)]
            for node in taken:
                cluster.scheduler.slot_failed(node, Failure("no GPU"))
        assert cluster.scheduler.fatal_error == "no GPU"


def test_a_node_with_other_code_gets_no_packs(tmp_path):
    """Its pack, if it had one, is not blamed. If all nodes have other code, the study stops and says so."""
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        scheduler = cluster.scheduler
        scheduler.health.update({"new": "10.0.0.8"}, ["new", "sound"], set(), set())
        pack = cluster.take("slot", "sound")[1]
        scheduler.slot_failed("slot", Failure("torch is 3.0 instead of 2.8", "other code", "new"))
        assert scheduler.health.blocked == {"new"}, "the node of the host, not that of the slot"
        number, same = cluster.take("slot", "sound")
        assert same == pack
        cluster.complete(number, pack, near(0.3))
        scheduler.stop_if_no_node_is_left()
        assert not scheduler.stopping
        scheduler.health.update({}, ["new"], {"sound"}, set())
        scheduler.stop_if_no_node_is_left()
        reason = "node 10.0.0.8 has other code than the driver: torch is 3.0 instead of 2.8"
        assert (scheduler.stopping, scheduler.fatal_error) == (True, reason)


def test_every_trial_records_its_node_and_the_digest_of_its_code(tmp_path):
    """As its federation reported them. Equal ones are stored once."""
    with Cluster(tmp_path, study(methods=[GD]), lanes=2, federations=2) as cluster:
        cluster.ledger.begin_session()
        cluster.offer()
        expected = {}
        for order, name in zip(cluster.desk, "ab", strict=True):
            cluster.report(order.number, "started", slot=name, nodes=(name,), code=f"digest {name}")
            cluster.complete(order.number, order.trials, near(0.3))
            expected |= {trial.key: (0, [name], f"digest {name}") for trial in order.trials}
        assert cluster.ledger.origins() == expected
        assert cluster.ledger.trials_by_code() == {"digest a": 2, "digest b": 1}
        assert cluster.ledger._db.execute("SELECT count(*) FROM origins").fetchone() == (2,)


def test_a_pack_that_starts_and_ends_between_two_exchanges_records_its_node_and_code(tmp_path):
    """Its start was handled after its results were recorded."""
    with Cluster(tmp_path, study()) as cluster:
        scheduler = cluster.scheduler
        (order,) = scheduler.next_orders()
        lanes = [lane_result(trial, near(0.02)(trial)) for trial in order.trials]
        started = Report("slot", order.number, "started", nodes=("node",), code="digest")
        ended = Report("slot", order.number, "ended", order.trials[0].rounds, lanes=lanes, computing_s=1.5)
        measured = []
        scheduler.queue.measure = lambda pack, seconds: measured.append(seconds)
        scheduler.receive([started, ended])
        assert cluster.ledger.trials_by_node() == {"node": len(order.trials)}
        assert cluster.ledger.trials_by_code() == {"digest": len(order.trials)}
        assert measured == [1.5], "no less than the time in rounds"
        assert not scheduler.in_flight


def test_a_node_with_another_gpu_gets_no_packs(tmp_path):
    """Results of different models differ in their last bits. The first slot decides."""
    with Cluster(tmp_path, study(methods=[GD]), lanes=1, federations=2) as cluster:
        scheduler = cluster.scheduler
        cluster.offer()
        first, second = cluster.desk
        started = {"nodes": ("a",), "accelerator": "NVIDIA H200"}
        cluster.report(first.number, "started", slot="a", **started)
        cluster.report(second.number, "started", slot="b", nodes=("b",), accelerator="NVIDIA A10")
        assert list(scheduler.in_flight) == [first.number]
        assert scheduler.superseded == [second.number]
        assert scheduler.health.refused == {
            "b": "node b has another accelerator than the first one: NVIDIA A10 instead of NVIDIA H200; "
            "resources.accelerator chooses one"
        }
        assert scheduler.queue.packs[0].trials == second.trials


def test_the_node_of_a_host_is_blamed_not_that_of_its_slot(tmp_path):
    """A federation may be spread over nodes."""
    with Cluster(tmp_path, study(), lanes=1, federations=2) as cluster:
        cluster.complete(*cluster.take("good", "sound"), near(0.3))
        cluster.take("good", "sound")
        for n in range(3):
            cluster.take(f"slot {n}", f"fine {n}")
        for n in range(3):
            cluster.scheduler.slot_failed(f"slot {n}", Failure("client host 1 has not answered", node="broken"))
        assert cluster.scheduler.health.blocked == {"broken"}


def test_a_pack_that_is_handed_back_resumes_elsewhere_and_is_not_blamed(tmp_path):
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        number, pack = cluster.take("slot", "spot")
        saved = checkpoint_name([trial.key for trial in pack])
        cluster.report(number, "handed back", round=3, checkpoint=saved, checkpoint_round=3)
        cluster.scheduler.slot_failed("slot", Failure("its node gets no more packs", "left"))
        cluster.offer()
        assert [(order.trials, order.resume_from) for order in cluster.desk] == [(pack, saved)]
        assert cluster.ledger.failures() == []
        assert cluster.scheduler.retries == cluster.scheduler.repeated_rounds == 0


def test_rounds_that_are_lost_are_counted(tmp_path):
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        number, pack = cluster.take()
        saved = checkpoint_name([trial.key for trial in pack])
        cluster.report(number, "progress", round=3, running=3, checkpoint=saved, checkpoint_round=2)
        cluster.scheduler.slot_failed("slot", Failure("gone", "node died"))
        assert cluster.scheduler.repeated_rounds == 1


def test_a_pack_that_kills_its_node_again_and_again_is_isolated(tmp_path):
    """If it gets no further; a pack that is lost with spot nodes and gets further each time is never given up."""
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        size = len(cluster.take()[1])
        for n in range(3 * LOST_WITH_NODES):
            cluster.scheduler.slot_failed("slot", Failure("gone", "node died"))
            number, pack = cluster.take()
            assert len(pack) == size
            cluster.report(number, "progress", round=n, running=size, checkpoint="saved", checkpoint_round=n + 1)
        for _ in range(LOST_WITH_NODES):
            cluster.scheduler.slot_failed("slot", Failure("gone", "node died"))
            last = cluster.take()[1]
        assert len(last) < size


def test_a_pack_whose_nodes_are_lost_after_its_process_is_isolated(tmp_path):
    """Ray reports the process as failed before it reports its node as dead: that is the same fault."""
    with Cluster(tmp_path, study(methods=[GD])) as cluster:
        health = cluster.scheduler.health
        size = len(cluster.take("slot", "node 0")[1])
        for n in range(3 * LOST_WITH_NODES):
            health.lost.add(f"node {n}")
            cluster.scheduler.slot_failed("slot", Failure("its process ended"))
            number, pack = cluster.take("slot", f"node {n + 1}")
            assert len(pack) == size, "it gets further each time"
            cluster.report(number, "progress", round=n, running=size, checkpoint="saved", checkpoint_round=n + 1)
        for n in range(3 * LOST_WITH_NODES, 4 * LOST_WITH_NODES):
            health.lost.add(f"node {n}")
            cluster.scheduler.slot_failed("slot", Failure("its process ended"))
            last = cluster.take("slot", f"node {n + 1}")[1]
        assert len(last) < size


def test_packs_get_smaller_after_a_slot_was_killed_for_memory(tmp_path):
    """Waiting packs, too: no further slot has to be killed for them."""
    with Cluster(tmp_path, study(methods=[GD]), lanes=2) as cluster:
        _, pack = cluster.take()
        assert len(pack) == 2
        cluster.scheduler.slot_failed("slot", Failure("killed due to the node running low on memory.", "out of memory"))
        assert cluster.run(near(0.3))[:6] == [1] * 6, "coarse and fine; confirm runs are another pack group"
        assert cluster.scheduler.sweep.finished
        assert len(cluster.ledger.failures()) == 1


def test_a_node_that_fails_several_packs_in_a_row_is_blocked(tmp_path):
    with Cluster(tmp_path, study(), lanes=1, federations=2) as cluster:
        cluster.complete(*cluster.take("good", "sound"), near(0.3))
        cluster.take("good", "sound")
        bad = [cluster.take(f"bad {n}", "broken") for n in range(3)]
        for n in range(3):
            cluster.scheduler.slot_failed(f"bad {n}", Failure("a dead mount"))
        assert len(bad) == 3
        assert cluster.scheduler.health.blocked == {"broken"}
        assert cluster.scheduler.health.clear_unreliable()
        assert not cluster.scheduler.health.blocked


def test_a_node_that_fails_the_only_federation_which_is_spread_is_blocked(tmp_path):
    """The federation has three nodes and cannot avoid one of them: the node at fault is blocked, not the slot's, and no
    trial fails. A pack that is at fault itself costs one node, and that only once."""
    with Cluster(tmp_path, of_many(64), lanes=32) as cluster:
        scheduler, health = cluster.scheduler, cluster.scheduler.health
        scheduler.queue.capacity = replace(scheduler.queue.capacity, placement="spread")
        health.update({}, ["a", "b", "c"], set(), set())

        def fail(node: str) -> int:
            size = len(cluster.take("slot", "a")[1])
            scheduler.slot_failed("slot", Failure("a dead mount", node=node))
            return size

        assert [fail("b") for _ in range(3)] == [32] * 3
        assert health.blocked == {"b"}
        assert fail("c") == 32, "not split"
        assert [fail("c") for _ in range(4)] == [16, 16, 16, 8], "split"
        assert health.blocked == {"b"}
        assert health.clear_unreliable()
        assert not health.block_once("b")


def test_a_pack_that_fails_everywhere_blocks_no_node(tmp_path):
    """Neither if its parts fail one after the other on one node, nor if it fails on several nodes."""
    with Cluster(tmp_path, of_many(64), lanes=32, federations=2) as cluster:
        cluster.scheduler._any_success = True
        cluster.take("good", "sound")
        tried = 0
        while tried < 12 and (cluster.take("slot", "blamed") or cluster.take("slot", "sound")) is not None:
            cluster.scheduler.slot_failed("slot", Failure("the pack is at fault"))
            tried += 1
        assert tried == 12, "three attempts of the whole and more of its parts"
        assert not cluster.scheduler.health.blocked


def test_failed_packs_keep_their_history_when_nodes_join(tmp_path):
    """When nodes join, waiting packs are packed again, except those that have failed and the parts of them."""
    with Cluster(tmp_path, of_many(64), lanes=64, federations=1) as cluster:
        for _ in range(2):
            cluster.take()
            cluster.scheduler.slot_failed("slot", Failure("died"))
        cluster.scheduler.queue.resize(2)
        assert [pack.failed_on for pack in cluster.scheduler.queue.packs] == [["node", "node"]]
        cluster.scheduler.queue.balance([], [])
        assert {tuple(pack.failed_on) for pack in cluster.scheduler.queue.packs} == {("node", "node")}
        cluster.take()
        cluster.scheduler.slot_failed("slot", Failure("died"))
        halves = [len(pack) for pack in cluster.scheduler.queue.packs]
        cluster.scheduler.queue.resize(1)
        assert [len(pack) for pack in cluster.scheduler.queue.packs] == halves


def test_frequent_calls_do_not_iterate_over_all_waiting_trials(tmp_path):
    with Cluster(tmp_path, of_many(64), lanes=16) as cluster:
        cluster.offer()
        asked = []
        cluster.scheduler.sweep.waiting = type("Waiting", (dict,), {"__iter__": lambda d: asked.append(1)})(
            cluster.scheduler.sweep.waiting
        )
        cluster.offer()
        assert not asked


def test_rounds_before_a_checkpoint_are_not_counted_again(tmp_path):
    storage = PackStorage(str(tmp_path / "packs"))
    storage.create()
    with Cluster(tmp_path / "results", study(methods=[GD])) as cluster:
        _, pack = cluster.take()
        storage.save([trial.key for trial in pack], 2, b"half way")
    with Cluster(tmp_path / "results", study(methods=[GD]), storage=storage) as cluster:
        number, pack = cluster.take()
        cluster.report(number, "progress", round=3, running=len(pack))
        assert cluster.scheduler.lane_rounds == 0, "the checkpoint's round is not known"
        cluster.complete(number, pack, near(0.3))
        assert cluster.scheduler.lane_rounds == len(pack)


# ---- checkpoints


def test_a_pack_and_its_halves_resume_from_its_checkpoint(tmp_path):
    storage = PackStorage(str(tmp_path / "packs"))
    storage.create()
    with Cluster(tmp_path / "results", study(methods=[GD]), storage=storage) as cluster:
        number, pack = cluster.take()
        keys = [trial.key for trial in pack]
        storage.save(keys, 2, b"half way")
        cluster.report(number, "progress", round=2, running=3, checkpoint=checkpoint_name(keys))
        for expected in (3, 3, 1):
            cluster.scheduler.slot_failed("slot", Failure("died"))
            cluster.offer()
            assert [order.resume_from for order in cluster.desk] == [checkpoint_name(keys)]
            number, pack = cluster.take()
            assert len(pack) == expected
        cluster.complete(number, pack, near(0.3))
        assert storage.trials_by_checkpoint() == {checkpoint_name(keys): keys}, "the other half still needs it"
        number, pack = cluster.take()
        assert len(pack) == 2
        cluster.complete(number, pack, near(0.3))
        cluster.scheduler.close()
        assert storage.trials_by_checkpoint() == {}


def test_a_new_driver_resumes_the_packs_of_a_killed_one(tmp_path):
    """With the trials of each checkpoint that have not ended; a checkpoint without such trials is removed."""
    storage = PackStorage(str(tmp_path / "packs"))
    storage.create()
    with Cluster(tmp_path / "results", study(methods=[GD]), lanes=2, federations=2) as cluster:
        (first, ended), (_, running) = cluster.take(), cluster.take()
        cluster.complete(first, ended, near(0.3))
        storage.save([trial.key for trial in ended], 2, b"in the ledger")
        keys = [trial.key for trial in running]
        storage.save(keys, 2, b"half way")
    with Cluster(tmp_path / "results", study(methods=[GD]), lanes=128, storage=storage) as cluster:
        cluster.offer()
        assert [order.resume_from for order in cluster.desk] == [checkpoint_name(keys)]
        assert cluster.desk[0].trials == running
        assert list(storage.trials_by_checkpoint()) == [checkpoint_name(keys)]
        cluster.run(near(0.3))
        assert cluster.scheduler.sweep.finished


def test_parts_of_a_pack_resume_from_their_own_checkpoints(tmp_path):
    """The whole is kept until all its parts have ended: a driver that follows goes on from the parts, and takes of the
    whole only what no part has."""
    storage = PackStorage(str(tmp_path / "packs"))
    storage.create()
    with Cluster(tmp_path / "results", of_many(6)) as cluster:
        keys = [trial.key for trial in cluster.take()[1]]
    parts = [keys[:2], keys[2:4]]
    storage.save(keys, 2, b"the whole")
    for part in parts:
        storage.save(part, 3, b"a part")
    with Cluster(tmp_path / "results", of_many(6), storage=storage) as cluster:
        found = {pack.resume_from: [t.key for t in pack.trials] for pack in cluster.scheduler.queue.packs}
    assert found == {
        checkpoint_name(parts[0]): parts[0],
        checkpoint_name(parts[1]): parts[1],
        checkpoint_name(keys): keys[4:],
    }


# ---- slow nodes


class Simulation:
    """Slots of different speeds on a simulated clock. A pack takes `PACK_S` on a slot of speed 1."""

    PACK_S = 100.0

    def __init__(self, cluster: Cluster, speeds: list[float], monkeypatch) -> None:
        self.now, self.cluster, self.busy = 1000.0, cluster, {}
        self.speeds = {f"slot {n}": speed for n, speed in enumerate(speeds)}
        monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: self.now)

    def run(self) -> float:
        """The time until all trials have ended."""
        began, scheduler = self.now, self.cluster.scheduler
        while not scheduler.sweep.finished:
            self.cluster.offer()
            gone, scheduler.superseded = set(scheduler.superseded), []
            self.busy = {slot: run for slot, run in self.busy.items() if run[0] not in gone}
            for slot in sorted(self.speeds.keys() - self.busy.keys(), key=lambda slot: self.speeds[slot]):
                if found := self.cluster.take(slot, slot):
                    self.busy[slot] = (*found, self.now)
            self.now += 1.0
            for slot, (number, trials, started) in list(self.busy.items()):
                share = (self.now - started) * self.speeds[slot] / self.PACK_S
                if share >= 1:
                    del self.busy[slot]
                    self.cluster.complete(number, trials, near(0.02))
                else:
                    round_ = int(share * trials[0].last_round)
                    self.cluster.report(number, "progress", slot, round=round_, running=len(trials))
        return self.now - began


def test_a_slow_node_does_not_delay_the_sweep(tmp_path, monkeypatch):
    """One of four nodes is ten times slower: idle slots compute copies of its packs, and the first answer wins. The
    sweep takes at most 1.3 times as long as without that node, and gives the same stages."""
    of = slots.study(8, 3)
    took, stages = {}, {}
    for name, speeds in (("three", [1, 1, 1]), ("four", [1, 1, 1, 0.1])):
        with Cluster(tmp_path / name, of, lanes=1, federations=len(speeds)) as cluster:
            took[name] = Simulation(cluster, speeds, monkeypatch).run()
            stages[name] = cluster.ledger.stages()
            assert not cluster.scheduler.in_flight
            assert not cluster.scheduler.offered
    assert took["four"] <= 1.3 * took["three"], took
    assert stages["four"] == stages["three"]


def test_a_copy_is_offered_to_other_nodes_and_holds_up_no_pack(tmp_path):
    """On a cluster of one node there is no other."""
    for usable, expected in (({"slow", "fast"}, ("slow",)), ({"slow"}, ())):
        with Cluster(tmp_path / str(len(usable)), study(methods=[GD]), federations=2) as cluster:
            cluster.scheduler.health.update({}, usable, set(), set())
            cluster.scheduler.queue.pace = 1e-9
            number, pack = cluster.take("slow", "slow")
            cluster.scheduler.in_flight[number].began -= 1000
            (copy,) = cluster.scheduler.next_orders()
            assert (copy.trials, copy.not_on) == (pack, expected)
            waiting = cluster.scheduler.queue.pack(pack)
            cluster.scheduler.queue.packs.append(waiting)
            assert [order.trials for order in cluster.scheduler.next_orders()] == [waiting.trials]


@pytest.mark.parametrize("other", ["lost", "used by another job"])
def test_a_copy_without_a_taker_is_offered_to_all_nodes(tmp_path, monkeypatch, other):
    """Its original has failed, and no slot runs on another node."""
    now = [1000.0]
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: now[0])
    with Cluster(tmp_path, study(methods=[GD]), federations=2) as cluster:
        cluster.scheduler.health.update({}, ["slow", "other"], set(), set())
        cluster.scheduler.queue.pace = 1e-9
        _, pack = cluster.take("slot", "slow")
        now[0] += 1000
        assert cluster.take("slot", "slow") is None, "the copy is for the other node"
        cluster.scheduler.slot_failed("slot", Failure("died"))
        if other == "lost":
            cluster.scheduler.health.update({}, ["slow"], {"other"}, set())
        now[0] += PREFER_OTHERS_S
        assert cluster.take("slot", "slow")[1] == pack
        assert len(cluster.scheduler.superseded) == 1


def test_a_copy_that_no_slot_has_taken_is_withdrawn(tmp_path):
    """It is not queued: the original still runs, or has ended meanwhile."""
    for ended in (False, True):
        with Cluster(tmp_path / str(ended), study(methods=[GD]), federations=2) as cluster:
            cluster.scheduler.queue.pace = 1e-9
            number, pack = cluster.take("slow", "slow")
            cluster.scheduler.in_flight[number].began -= 1000
            cluster.offer()
            (copy,) = cluster.desk
            if ended:
                cluster.complete(number, pack, near(0.3))
            cluster.scheduler.stopping = True
            waiting = list(cluster.scheduler.queue.packs)
            cluster.scheduler.withdraw([copy.number])
            assert cluster.scheduler.queue.packs == waiting
            assert not cluster.scheduler.offered


def test_a_copy_and_its_original_are_one_pack(tmp_path):
    """If one of them fails, the other remains; the answer of the slower one is ignored."""
    with Cluster(tmp_path, study(methods=[GD]), federations=2) as cluster:
        cluster.scheduler.queue.pace = 1e-9
        number, pack = cluster.take("slow", "slow")
        cluster.scheduler.in_flight[number].began -= 1000
        copy, same = cluster.take("fast", "fast")
        assert same == pack
        assert cluster.take("third", "third") is None, "one copy of each pack"
        cluster.scheduler.slot_failed("slow", Failure("died"))
        assert list(cluster.scheduler.in_flight) == [copy]
        assert cluster.scheduler.queue.packs == []
        cluster.scheduler.in_flight[copy].began -= 1000
        again, same = cluster.take("slow", "slow")
        assert same == pack
        cluster.complete(again, pack, near(0.3))
        assert cluster.scheduler.superseded == [copy]
        before = cluster.ledger.outcomes()
        cluster.complete(copy, pack, near(0.9))
        assert cluster.ledger.outcomes() == before


# ---- packs without progress


def test_packs_that_make_no_progress_are_recorded(tmp_path, monkeypatch):
    """Judged by the longest pause between two reports so far: a slow study is not taken for one that hangs."""
    now = [1000.0]
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: now[0])
    with Cluster(tmp_path, study(), lanes=2, federations=2) as cluster:
        cluster.scheduler.health.names["id"] = "10.0.0.7"
        (first, _), (second, _) = cluster.take("a", "id"), cluster.take("b", "other")

        def stalled() -> list[tuple[str, int]]:
            cluster.scheduler.record_stalls()
            return [(stall.node, stall.trials) for stall in cluster.ledger.stalls()]

        now[0] += 50
        assert stalled() == []
        cluster.report(second, "progress", round=1, running=2)
        now[0] += 100
        assert stalled() == [], "five times the longest pause have not passed"
        now[0] += 120
        cluster.report(second, "progress", round=2, running=2)
        now[0] += 1000
        assert stalled() == [("10.0.0.7", 2)], "the other one has had pauses of 220 s"
        cluster.report(first, "progress", round=1, running=2)
        assert stalled() == []
        assert cluster.scheduler.stall_changes == 2


# ---- very many trials


def seconds_of_processor(folder: Path, trials: int) -> float:
    """To plan and record this many trials: half of them coarse, half fine, in packs of 128."""
    axis = [0.001 * (k + 1) for k in range(trials // 200)]
    method = {
        "name": "dp-fedsofim",
        "coarse": {"learning_rate": axis, "rho": [1 + k for k in range(10)], "beta": [0.05 * k for k in range(10)]},
        "fine": {"learning_rate": axis, "rho": [21 + k for k in range(10)], "beta": [0.05 * k for k in range(10)]},
    }
    of = study(methods=[method])
    began = time.process_time()
    with Cluster(folder, of) as cluster:
        sizes = cluster.run(near(0.01))
        assert cluster.scheduler.sweep.finished
        assert len(cluster.ledger.outcomes()) == trials + 2
        assert len(sizes) < trials / 100
    with Ledger.write(folder) as ledger:
        assert Sweep(PreparedStudy.prepare(of), ledger).finished
    assert status.read(folder)["finished"]
    return time.process_time() - began


def test_twice_as_many_trials_take_about_twice_as_long(tmp_path):
    """To plan and record: no cost is quadratic."""
    half, whole = (
        min(seconds_of_processor(tmp_path / f"{count}-{attempt}", count) for attempt in range(2))
        for count in (2_400, 4_800)
    )
    assert whole < 3 * half, f"{half:.1f} s for 2,400 trials, {whole:.1f} s for 4,800"


def test_large_groups_are_not_packed_again_when_nodes_join(tmp_path):
    """Their packs have the full size already: packing a million trials again would take long and change nothing."""
    with Cluster(tmp_path, of_many(96), lanes=16, federations=2) as cluster:
        cluster.offer()
        before = [id(pack) for pack in cluster.scheduler.queue.packs]
        cluster.scheduler.queue.resize(3)
        assert before
        assert [id(pack) for pack in cluster.scheduler.queue.packs] == before
