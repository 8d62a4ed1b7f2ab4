"""Slots on a real Ray and Tune, with federations that only wait: all work at once, and stay."""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.tune.search import Searcher
from simulated_search import GD, SOFIM, drive, study

from benchmarks.waiting import WaitingFederation, _result
from orchestrator.execution.backends import ray as ray_backend
from orchestrator.execution.cluster import nodes
from orchestrator.execution.packing import Capacity
from orchestrator.execution.sweep import Sweep
from orchestrator.results.ledger import Ledger
from orchestrator.study.cells import Blueprint
from trainables.federation.checkpoints import PackStorage
from trainables.ray_actors.federation import FederationSize

pytestmark = pytest.mark.ray

CORES = 2  # of the local Ray
STUDY = study(methods=[GD, SOFIM], epsilons=[8, 4])


def judge(trial):
    metrics = _result(trial).metrics
    return "done", metrics["accuracy"][trial.rounds], metrics["loss"][trial.rounds]


def swept(folder: Path, slots: int, start, of=STUDY, lanes: int = 1, **more) -> tuple[dict, dict]:
    """Outcomes and stages of a study whose trials are packs of their own, on slots that fill the Ray."""
    with Ledger.write(folder / "results") as ledger:
        sweep = Sweep(Blueprint.draw(of), ledger)
        size = Capacity(FederationSize(1, cpus_per_host=CORES / slots), slots, lanes_per_pack=lanes, **more)
        ray_backend.run(sweep, size, lambda _: None, PackStorage(str(folder / "packs")), folder / "tune", start=start)
        assert sweep.finished
        return ledger.outcomes(), ledger.stages()


def test_all_slots_work_at_the_same_moment_and_stay(local_ray, tmp_path):
    """More slots than cores. No pack ends before four processes have one: if it ends at all, four have worked at once.
    Over three stages of four cells no federation is started twice, and what comes out is what one after the other
    comes out."""
    seen, slots = tmp_path / "seen", 4
    seen.mkdir()
    outcomes, stages = swept(tmp_path, slots, functools.partial(WaitingFederation, 0.01, slots, str(seen)))
    for what in ("up", "began", "packs"):
        assert len(list(seen.glob(f"{what}-*"))) == slots
    packs = [line for file in seen.glob("packs-*") for line in file.read_text().splitlines()]
    assert len(packs) == len(outcomes)
    assert stages == drive(tmp_path / "plain", STUDY, judge).stages
    assert not (tmp_path / "tune").exists(), "Tune's scratch is thrown away"
    assert not (tmp_path / "packs").exists()


def test_a_slot_that_did_not_start_is_started_again(local_ray, tmp_path):
    """More often than there are slots, so one of them twice."""
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
    assert stages == drive(tmp_path / "plain", STUDY, judge).stages
    assert len(outcomes) == len({key for keys in stages.values() for key in keys})


def test_gpus_that_come_take_over_what_has_not_begun(local_ray, tmp_path, monkeypatch):
    """The packs in flight end where they are; nothing that ended is run again."""
    monkeypatch.setattr(ray_backend, "LOOK_EVERY_S", 0.0)
    seen = tmp_path / "seen"
    seen.mkdir()
    come = {"CPU": 1.0, "GPU": 1.0}
    monkeypatch.setattr(nodes, "free_resources", lambda: [come] if any(seen.glob("packs-*")) else [{"GPU": 8.0}])
    start = functools.partial(WaitingFederation, 0.2, 1, str(seen))
    with pytest.raises(ray_backend.GPUsCameError):
        swept(tmp_path, 2, start, waits_for_gpus=True)
    with Ledger.read(tmp_path / "results") as ledger:
        before = ledger.outcomes()
    outcomes, stages = swept(tmp_path, 2, start)  # as the driver goes on: without a wait for more
    assert 0 < len(before) < len(outcomes)
    ran = [json.loads(line) for file in seen.glob("packs-*") for line in file.read_text().splitlines()]
    assert len(ran) == len(outcomes)
    assert stages == drive(tmp_path / "plain", STUDY, judge).stages


def test_what_tune_writes_does_not_grow_with_the_trials(local_ray, tmp_path, monkeypatch):
    """Its own state knows slots, not trials."""
    written = []
    rmtree = shutil.rmtree

    def removed(folder, **more):
        if Path(folder).name == "tune":
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


def test_slots_are_suggested_while_there_is_use_for_them():
    """And when all is over Tune is told so: it would wait ten minutes for a first one."""
    conductor = SimpleNamespace(over=False, size=SimpleNamespace(federations=3), has_use_for=lambda slots: slots <= 2)
    slots = ray_backend.Slots(conductor)
    assert [slots.suggest(name) for name in "abc"] == [{"slot": "a"}, {"slot": "b"}, None]
    conductor.over = True
    assert slots.suggest("d") == Searcher.FINISHED


def ends_well(program: str) -> None:
    """In a Python that has imported nothing yet."""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_slot_has_no_use_for_torch():
    """It takes seconds to import, and the federation waits for them: its own processes import it, side by side."""
    program = (
        "import sys\n"
        "from trainables import federation, lane_result, pack_desk, pack_slot, pack_storage, spec\n"
        "sys.exit('torch' in sys.modules)"
    )
    ends_well(program)


def test_whoever_plans_has_no_use_for_torch_either():
    """A study is read, checked and its data dealt before Ray starts: nothing that it is made of touches torch."""
    program = (
        "import sys\n"
        "from orchestrator.running import runner, sweeping\n"
        "from orchestrator.study import cells, reading\n"
        "cells.Blueprint.draw(reading.load('quickstart')[0])\n"
        "sys.exit('torch' in sys.modules)"
    )
    ends_well(program)


def test_what_is_imported_later_travels_by_its_name():
    """In a function that Ray sends with all it uses, before torch is there and after."""
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
    ends_well(program)


FAILURES = """\
Failure # 1 (occurred at 2026-11-16_01-02-03)
The actor died because its node has died. Node Id: 5e
\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats
Failure # 2 (occurred at 2026-11-16_01-03-03)
Traceback (most recent call last):
  File "python/ray/_raylet.pyx", line 1, in step
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tnamespace: x
The actor is dead because its node has died. Node Id: 5e
\tthe actor's node was terminated: received SIGTERM Some common causes include: many
"""


def test_the_cause_of_a_death_stands_lines_before_its_details(tmp_path):
    """As Ray words it, and Tune writes it down: one failure after the other."""
    file = tmp_path / "error.txt"
    file.write_text(FAILURES)
    failure = ray_backend._failure(SimpleNamespace(error_file=str(file)))
    assert failure.startswith(" 2 (occurred at")
    assert ray_backend.NODE_DIED in failure
    assert ray_backend._reason(failure) == "the actor's node was terminated: received SIGTERM"
    for nothing in (None, str(tmp_path / "gone")):
        assert (
            ray_backend._reason(ray_backend._failure(SimpleNamespace(error_file=nothing)))
            == "its process ended without a word"
        )
