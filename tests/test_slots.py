"""Slots on a real Ray and Tune, with federations that only wait: all run at the same time, and are reused."""

import contextlib
import functools
import gc
import json
import pickle
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ray import cloudpickle
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError
from ray.tune.search import Searcher
from simulated_search import GD, SOFIM, drive, study

from benchmarks.waiting import WaitingFederation, _result
from orchestrator.execution.backends import ray as ray_backend
from orchestrator.execution.backends.base import SweepRun
from orchestrator.execution.cluster import failures, nodes, ray_internals
from orchestrator.execution.packing import Capacity
from orchestrator.execution.progress import View
from orchestrator.execution.sweep import Sweep
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import PACKS, results_location
from orchestrator.study.cells import PreparedStudy
from trainables.code_identity import OtherCodeError
from trainables.errors import UserError
from trainables.federation.federation_size import FederationSize
from trainables.federation.messages import Failure, Order, Report
from trainables.ray_actors import slot as slot_module
from trainables.ray_actors.desk import Pace
from trainables.ray_actors.errors import ActorLostError, HungError, NodeExcludedError, NotStartedError

pytestmark = pytest.mark.ray

CORES = 2  # of the local Ray
STUDY = study(methods=[GD, SOFIM], epsilons=[8, 4])


def outcome(trial):
    metrics = _result(trial).metrics
    return "done", metrics["accuracy"][trial.rounds], metrics["loss"][trial.rounds]


def swept(folder: Path, slots: int, start, of=STUDY, lanes: int = 1, **more) -> tuple[dict, dict]:
    """Outcomes and stages of a study with one trial per pack, on slots that use the whole Ray."""
    with Ledger.write(folder / "results") as ledger:
        sweep = Sweep(PreparedStudy.prepare(of), ledger)
        size = Capacity(FederationSize(1, cpus_per_host=CORES / slots), slots, lanes_per_pack=lanes, **more)
        run = SweepRun(sweep, of.resources, results_location(folder / "results"), View())
        ray_backend.run_slots(run, size, start=start)
        assert sweep.finished
        return ledger.outcomes(), ledger.stages()


def test_all_slots_run_at_the_same_time_and_are_reused(local_ray, tmp_path, monkeypatch):
    """More slots than cores. No pack ends before four processes have one: if it ends at all, four have worked at once.
    Over three stages of four cells no federation is started twice, and what comes out is what one after the other
    comes out."""
    seen, slots = tmp_path / "seen", 4
    seen.mkdir()
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr(ray_backend, "private_folder", lambda: private)
    planted = tmp_path / "results" / ".tune" / "slots"
    planted.parent.mkdir(parents=True)
    planted.symlink_to(seen)
    outcomes, stages = swept(tmp_path, slots, functools.partial(WaitingFederation, 0.01, slots, str(seen)))
    for what in ("up", "began", "packs"):
        assert len(list(seen.glob(f"{what}-*"))) == slots
    packs = [line for file in seen.glob("packs-*") for line in file.read_text().splitlines()]
    assert len(packs) == len(outcomes)
    assert stages == drive(tmp_path / "plain", STUDY, outcome).stages
    assert planted.is_symlink(), "Tune uses no folder of a stranger"
    assert not any(private.iterdir()), "its own is thrown away"
    assert not (tmp_path / "results" / PACKS).exists()


def test_a_slot_that_did_not_start_is_restarted(local_ray, tmp_path):
    """There are more failures than slots, so one slot fails twice."""
    seen, slots = tmp_path / "seen", 2
    seen.mkdir()

    def stumbling():
        for number in range(slots + 1):
            try:
                (seen / f"failed-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            raise RuntimeError("it does not start")
        return WaitingFederation(0.01, 1, str(seen))

    outcomes, stages = swept(tmp_path, slots, stumbling)
    assert len(list(seen.glob("failed-*"))) == slots + 1
    assert stages == drive(tmp_path / "plain", STUDY, outcome).stages
    assert len(outcomes) == len({key for keys in stages.values() for key in keys})


def test_waiting_packs_move_to_gpus_that_join(local_ray, tmp_path, monkeypatch):
    """The packs in flight end on the CPU; nothing is run twice."""
    monkeypatch.setattr(ray_backend, "CHECK_NODES_EVERY_S", 0.0)
    seen = tmp_path / "seen"
    seen.mkdir()
    come = {"CPU": 1.0, "GPU": 1.0}
    monkeypatch.setattr(nodes, "free_resources", lambda *_: [come] if any(seen.glob("packs-*")) else [{"GPU": 8.0}])
    start = functools.partial(WaitingFederation, 0.2, 1, str(seen))
    with pytest.raises(ray_backend.GPUsAvailableError):
        swept(tmp_path, 2, start, prefers_gpus=True)
    with Ledger.read(tmp_path / "results") as ledger:
        before = ledger.outcomes()
    outcomes, stages = swept(tmp_path, 2, start)  # as the driver continues: GPUs are not waited for
    assert 0 < len(before) < len(outcomes)
    ran = [json.loads(line) for file in seen.glob("packs-*") for line in file.read_text().splitlines()]
    assert len(ran) == len(outcomes)
    assert stages == drive(tmp_path / "plain", STUDY, outcome).stages


def test_what_tune_writes_does_not_grow_with_the_trials(local_ray, tmp_path, monkeypatch):
    """Its state contains slots, not trials."""
    written = []
    rmtree = shutil.rmtree

    def removed(folder, **more):
        if Path(folder).name.startswith("tune-"):
            written.append(sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()))
        rmtree(folder, **more)

    monkeypatch.setattr(shutil, "rmtree", removed)
    for trials in (2 * 128, 16 * 128):  # a pack for each of two slots, and eight
        axis = [0.001 * (k + 1) for k in range(trials)]
        method = {"name": "dp-fedgd", "coarse": {"learning_rate": axis}, "fine": {"learning_rate": [2.0]}}
        folder = tmp_path / str(trials)
        seen = folder / "seen"
        seen.mkdir(parents=True)
        start = functools.partial(WaitingFederation, 0.0, 1, str(seen))
        swept(folder, 2, start, study(methods=[method]), lanes=128)
    few, many = written
    assert many < 1.5 * few


def test_slots_are_suggested_while_there_is_work_for_them():
    """At the end Tune is told to finish: it would wait ten minutes for a first slot."""
    queue = SimpleNamespace(capacity=SimpleNamespace(federations=3))
    scheduler = SimpleNamespace(over=False, queue=queue, can_use=lambda slots: slots <= 2)
    slots = ray_backend.SlotSearcher(scheduler)
    assert [slots.suggest(name) for name in "abc"] == [{"slot": "a"}, {"slot": "b"}, None]
    scheduler.over = True
    assert slots.suggest("d") == Searcher.FINISHED


@pytest.fixture
def hung_slots(monkeypatch):
    """A callback, and the slots that it has killed."""
    killed = []
    monkeypatch.setattr(ray_backend.ray, "kill", killed.append)
    monkeypatch.setattr(ray_backend, "actor_of", lambda trial: trial.trial_id)
    callback = object.__new__(ray_backend.SweepCallback)
    callback._last_heard = {}
    return callback, killed


def running(slots: int) -> list:
    return [SimpleNamespace(trial_id=n, status="RUNNING", node_ip="10.0.0.7") for n in range(slots)]


@pytest.mark.parametrize(("slots", "timeout"), [(1, 120), (800, 120), (2000, 300), (8000, 1200)])
def test_the_timeout_of_a_heartbeat_grows_with_the_time_between_two(hung_slots, slots, timeout):
    """Many slots send heartbeats less often, so that the driver is not busy with them."""
    callback, killed = hung_slots
    callback._last_heard[0] = 0.0
    callback._kill_hung_slots(timeout - 1.0, running(slots))
    assert killed == []
    callback._kill_hung_slots(timeout + 1.0, running(slots))
    assert killed == [0]


def test_a_driver_that_was_stopped_kills_no_slot(hung_slots, monkeypatch):
    """Ctrl-Z, and an hour later fg: the heartbeats wait at the desk, and are fetched before slots are judged."""
    callback, killed = hung_slots
    scheduler = SimpleNamespace(
        stopping=False, moving_to_gpus=False, over=False, record_stalls=lambda: None, slot_failed=None
    )
    callback.scheduler, callback._failed, callback._exchanged, callback._checked_nodes = scheduler, [], 0.0, 0.0
    callback._stop_monitor, callback._desk_closed = SimpleNamespace(check=lambda: None), False
    now = ray_backend.time.monotonic()
    callback._last_heard = {0: now - 3600, 1: now - 3600}
    monkeypatch.setattr(callback, "_check_nodes", lambda *_: None)
    monkeypatch.setattr(callback, "_exchange", lambda: callback._last_heard.update({1: now}))
    callback.on_step_begin(1, running(2))
    assert killed == [0], "only the slot that was silent all the while"


def test_a_pack_is_handed_back_when_the_storage_answers_again(monkeypatch):
    """Meanwhile its rounds go on."""
    now, reports, done = [0.0], [], Report("slot", 1, "handed back")
    monkeypatch.setattr(slot_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(slot_module.ray, "get", lambda answer, **_: answer)
    slot = object.__new__(slot_module.PackSlot)
    slot._start_error, slot._pace, slot._packs = None, Pace.of(1)._replace(step_s=-1.0), 0
    slot._advice, slot._next_hand_back = (1, "hand back"), -1.0
    slot._last = slot._slot = slot._node = None
    slot._desk = SimpleNamespace(take=SimpleNamespace(remote=lambda *request: reports.append(request[-1])))
    answers, rounds = iter([None, None, done]), []

    def hand_back() -> Report | None:
        if (answer := next(answers)) is not None:
            slot.runner.order = None
        return answer

    slot.runner = SimpleNamespace(order=SimpleNamespace(number=1), hand_back=hand_back, federation=None)

    def advance() -> None:
        rounds.append(1)
        now[0] += slot_module.HAND_BACK_AGAIN_S / 2

    monkeypatch.setattr(slot, "_advance", advance)
    while not reports:
        slot.step()
        now[0] += 0.1
    assert reports == [done]
    assert len(rounds) == 4, "two between attempts"


def runs_in_a_new_process(program: str) -> None:
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_slot_keeps_the_references_to_the_data_of_its_packs(monkeypatch):
    """Also after the pack: Ray can lose an object whose last reference is dropped while it is received again."""

    class Reference:
        """Stands for Ray's."""

    class Desk:
        def __init__(self):
            self.orders = [Order(number, pickle.dumps([]), data=Reference()) for number in (1, 2)]
            self.references = [weakref.ref(order.data) for order in self.orders]
            self.take = SimpleNamespace(remote=lambda *_: self.orders.pop(0) if self.orders else None)

    class Runner:
        order = None
        federation = None

        def start(self, order):
            self.order = order

    def end_pack(slot):
        slot.runner.order = None

    monkeypatch.setattr(slot_module.ray, "get", lambda answer, **_: answer)
    monkeypatch.setattr(slot_module.PackSlot, "_advance", end_pack)
    slot, desk = object.__new__(slot_module.PackSlot), Desk()
    slot._desk, slot._slot, slot._node, slot.runner = desk, "a", "n1", Runner()
    slot._start_error, slot._advice, slot._pace, slot._packs = None, (0, ""), Pace.of(1), 0
    slot._last, slot._references = None, set()
    slot.step()
    gc.collect()
    assert not desk.orders, "both packs have ended"
    assert all(reference() is not None for reference in desk.references)


def test_a_slot_does_not_import_torch():
    """The import takes seconds; the federation's own processes do it in parallel."""
    program = (
        "import sys\n"
        "from trainables.federation import checkpoints, lane_result, pack_runner, trial_spec\n"
        "from trainables.ray_actors import desk, federation, slot\n"
        "sys.exit('torch' in sys.modules)"
    )
    runs_in_a_new_process(program)


def test_planning_does_not_import_torch():
    """Reading and checking a study and partitioning its data, before Ray starts, needs no torch."""
    program = (
        "import sys\n"
        "from orchestrator.execution import study_run\n"
        "from orchestrator.execution.backends import ray\n"
        "from orchestrator.study import cells, reading\n"
        "cells.PreparedStudy.prepare(reading.load('quickstart')[0])\n"
        "sys.exit('torch' in sys.modules)"
    )
    runs_in_a_new_process(program)


def test_lazy_modules_are_pickled_by_name():
    """In a function that Ray pickles by value, before and after torch is imported."""
    program = (
        "import sys\n"
        "from ray import cloudpickle\n"
        "from trainables.lazy import torch\n"
        "def sent():\n"
        "    return torch.ones(2).sum().item()\n"
        "before = cloudpickle.dumps(sent)\n"
        "assert 'torch' not in sys.modules\n"
        "assert sent() == 2\n"
        "assert max(len(before), len(cloudpickle.dumps(sent))) < 2000\n"
        "assert cloudpickle.loads(before)() == 2\n"
    )
    runs_in_a_new_process(program)


def died(message: str) -> ActorDiedError:
    context = ActorDiedErrorContext(error_message=message, class_name="ServerActor", actor_id=bytes(16))
    return ActorDiedError(context)


def lost(message: str) -> ActorLostError:
    return ActorLostError.of(died(message))


def elsewhere(error: Exception) -> RayTaskError:
    """As it arrives from another process."""
    arrived = cloudpickle.loads(cloudpickle.dumps(RayTaskError("step", "Traceback ...", error)))
    return arrived.as_instanceof_cause()


def error_of_cuda(text: str, code: int) -> torch.AcceleratorError:
    """As CUDA itself reports it, with torch's advice."""
    error = torch.AcceleratorError(f"CUDA error: {text}\nCompile with `TORCH_USE_CUDA_DSA`.\n")
    error.error_code = code
    return error


@pytest.mark.parametrize(
    ("error", "cause_of_death", "expected"),
    [
        (died("its node has died"), "node died", Failure("its node has died", "node died", "its node")),
        (elsewhere(lost("its node has died")), "node died", Failure("its node has died", "node died", "its node")),
        (elsewhere(elsewhere(lost("gone Some common causes: ..."))), "", Failure("gone", "error", "its node")),
        (died("its node has died"), "", Failure("its node has died", "error", "its node")),
        (elsewhere(lost("killed")), "out of memory", Failure("killed", "out of memory", "its node")),
        (elsewhere(elsewhere(MemoryError("too much"))), "", Failure("MemoryError: too much", "out of memory")),
        (OutOfMemoryError("the node ran out"), "", Failure("OutOfMemoryError: the node ran out", "out of memory")),
        (
            elsewhere(elsewhere(error_of_cuda("out of memory", 2))),
            "",
            Failure("AcceleratorError: CUDA error: out of memory", "out of memory"),
        ),
        (
            elsewhere(error_of_cuda("an illegal memory access was encountered", 700)),
            "",
            Failure("AcceleratorError: CUDA error: an illegal memory access was encountered", "error"),
        ),
        (elsewhere(ValueError("at 3:4:\nthe reason")), "", Failure("ValueError: the reason", "error")),
        (elsewhere(HungError("no answer")), "", Failure("HungError: no answer", "error")),
        (elsewhere(HungError("no answer", "n2")), "", Failure("HungError: no answer", "error", "n2")),
        (
            elsewhere(OtherCodeError("torch is 3 instead of 2", "n2")),
            "",
            Failure("torch is 3 instead of 2", "other code", "n2"),
        ),
        (elsewhere(NotStartedError("OSError: full", "n2")), "", Failure("OSError: full", "error", "n2")),
        (elsewhere(NodeExcludedError()), "", Failure("its node gets no more packs", "left")),
        (elsewhere(ValueError("running low on memory")), "", Failure("ValueError: running low on memory", "error")),
        (None, "", Failure("its process ended without an error message", "error")),
    ],
)
def test_failure_kinds_come_from_types_and_from_records_of_dead_actors(error, cause_of_death, expected, monkeypatch):
    """Never from the words of a message."""
    monkeypatch.setattr(ray_internals, "death_cause", lambda actor_id: (cause_of_death, "its node"))
    assert failures.failure_from(error) == expected


def test_the_failure_of_a_slot_is_what_tune_has_recorded(tmp_path):
    file = tmp_path / "error.pkl"
    file.write_bytes(cloudpickle.dumps(elsewhere(ValueError("wrong"))))
    assert failures.failure_of(SimpleNamespace(pickled_error_file=str(file))) == Failure("ValueError: wrong")
    for nothing in (None, str(tmp_path / "gone")):
        failure = failures.failure_of(SimpleNamespace(pickled_error_file=nothing))
        assert failure == Failure("its process ended without an error message")


def test_a_desk_that_cannot_live_ends_the_study(monkeypatch, tmp_path):
    """For example if no worker process can start: not a loop without end."""
    backend, starts = ray_backend, []

    def lose_the_desk(*_, **__):
        starts.append(1)
        raise backend.DeskLostError from RuntimeError("The worker died.\nmore")

    for name in ("_free_capacity", "within_memory", "session_folder", "session_facts"):
        monkeypatch.setattr(backend, name, lambda *_: {})
    monkeypatch.setattr(backend, "connected", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(backend.head, "watched", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(backend.nodes, "node_resources", list)
    monkeypatch.setattr(backend, "run_slots", lose_the_desk)
    sweep = SimpleNamespace(
        outcomes={},
        prepared=SimpleNamespace(most_clients=1, most_weights=1),
        ledger=SimpleNamespace(begin_session=lambda _: None),
    )
    view = contextlib.nullcontext()
    view.started = lambda *_: None
    run = SimpleNamespace(sweep=sweep, resources=None, view=view, location=results_location(tmp_path))
    with pytest.raises(UserError, match=r"the desk's process died 5 times before a trial ended: The worker died\.$"):
        backend.RayBackend().run(run)
    assert len(starts) == 5
