"""Faults that new users met: messages, hints and exit codes of the first hour."""

import errno
import os
import shlex
import sqlite3
import subprocess
import sys
import warnings
from importlib import metadata

import pytest
import small

import fedsweep as face
from orchestrator.execution import machine_speed, study_run
from orchestrator.results import ledger
from orchestrator.study.reading import from_mapping
from trainables.errors import UserError

STUDY = {
    "name": "tiny",
    "data": [small.SMALL],
    "clients": 4,
    "methods": [{"dp-fedgd": {"coarse": {"learning_rate": [1]}, "fine": {"learning_rate": [1]}}}],
    "defaults": "paper",
    "epsilons": [5],
    "rounds": {"coarse": 2, "fine": 2, "confirm": 2},
    "seeds": {"search": [1], "contest": [], "confirm": [42]},
}


def test_a_disk_that_is_full_when_the_ledger_is_created(tmp_path, monkeypatch, fedsweep):
    """The advice works: there is nothing to resume, and the same study runs once there is room."""
    folder, connect = tmp_path / "results", ledger._connect

    def small_disk(*arguments):
        connection = connect(*arguments)
        connection.execute("PRAGMA max_page_count=5")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "_connect", small_disk)
        with pytest.raises(UserError, match="disk is full; nothing was recorded yet: run the study again") as caught:
            face.run_study(STUDY, folder, backend="local")
    assert isinstance(caught.value.__cause__, sqlite3.Error)
    for command in ("resume", "status"):
        code, _, err = fedsweep(command, folder)
        assert code == 2
        assert "version" not in err
        assert "run the study again" in err
    assert face.run_study(STUDY, folder, backend="local").finished


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "there is room"), (errno.EDQUOT, "there is room"), (errno.EACCES, "it can be written")],
)
def test_the_advice_fits_the_cause(tmp_path, monkeypatch, number, advice):
    """The folder's name says nothing about the disk."""
    folder = tmp_path / "full"

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number), str(folder / "fedsweep.log"))

    monkeypatch.setattr(study_run, "_log_to", refuse)
    with pytest.raises(UserError, match=rf"; nothing was recorded yet: run the study again once {advice}$"):
        face.run_study(STUDY, folder, backend="local")


def test_hints_can_be_pasted_into_a_shell(tmp_path, monkeypatch, fedsweep):
    monkeypatch.chdir(tmp_path)
    folder = "my results; $HOME"
    (tmp_path / "tiny.yaml").write_text(
        "name: tiny\ndata: ['synthetic-frozen:600,100,12,4']\nclients: 4\nepsilons: [5]\ndefaults: paper\n"
        "methods: [{dp-fedgd: {coarse: {learning_rate: [1]}, fine: {learning_rate: [1]}}}]\n"
        "rounds: {coarse: 2, fine: 2, confirm: 2}\nseeds: {search: [1], contest: [], confirm: [42]}\n"
    )
    code, _, err = fedsweep("run", "tiny.yaml", "--results", folder, "--backend", "local")
    assert code == 0, err
    (hint,) = [line.partition(": ")[2] for line in err.splitlines() if "HTML report" in line]
    assert shlex.split(hint) == ["fedsweep", "report", folder]
    _, out, _ = fedsweep("best", folder)
    assert shlex.split(out.partition("to retrain one: ")[2])[3] == f"{folder}/best.yaml"


def test_a_name_with_other_letters_is_refused_without_a_regular_expression():
    with pytest.raises(UserError) as caught:
        from_mapping({**STUDY, "name": "étude π"}, "the study")
    assert str(caught.value) == (
        "the study: name: it should be 1 to 64 letters (A-Z, a-z), digits or . _ - and begin with a letter or digit "
        "(found 'étude π')"
    )


def test_a_checkout_that_is_not_installed(tmp_path, monkeypatch, fedsweep):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    folder = tmp_path / "results"
    face.run_study(STUDY, folder, backend="local")
    monkeypatch.setattr("orchestrator.version.metadata.version", missing)
    assert fedsweep("--version")[:2] == (0, "fedsweep unknown\n")
    assert fedsweep("report", folder)[0] == 0
    monkeypatch.setattr("orchestrator.commands.doctor._version", lambda name: ("1", True))
    code, out, _ = fedsweep("doctor")
    assert code == 0
    assert "unknown" in out.splitlines()[0]


@pytest.mark.ray
def test_weights_can_be_changed(local_ray):
    import torch

    model = face.train(small.SMALL, method="dp-fedgd", epsilon=8, rounds=2, clients=4, hosts=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.from_numpy(model.weights).add_(1)


@pytest.mark.ray
def test_training_inside_a_tune_trial_says_what_to_reserve(local_ray):
    """As Tune runs a trial: in the first bundle of a placement group that also holds everything it starts."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    data = small.SMALL

    def train(small):
        import fedsweep
        from orchestrator.execution import training_federation

        training_federation.SMALL = small
        try:
            return fedsweep.train(data, method="dp-fedgd", epsilon=8, rounds=2, clients=4).state
        except fedsweep.UserError as error:
            return str(error)

    outcomes = []
    for small_below, *bundles in ((0, {"CPU": 1}), (0, {"CPU": 1}, {"CPU": 1}), (1e9, {"CPU": 1})):
        group = placement_group(bundles)
        inside = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
        task = ray.remote(train).options(num_cpus=1, scheduling_strategy=inside)
        outcomes.append(ray.get(task.remote(small_below), timeout=300))
        ray.util.remove_placement_group(group)
    assert "reserves no CPU for client hosts, and would wait forever" in outcomes[0]
    assert outcomes[1:] == ["done", "done"], "a small run needs no hosts"


def test_budgets_are_shown_in_ascending_order(tmp_path):
    found = from_mapping({**STUDY, "epsilons": [1, float("inf"), 8, "mu=1", 3]}, "the study")
    assert found.epsilons == sorted(found.epsilons)
    face.run_study({**STUDY, "epsilons": [3, 1]}, tmp_path / "results", backend="local")
    header = next(line for line in (tmp_path / "results/tables/README.md").read_text().splitlines() if "ε = 3" in line)
    assert header.index("ε = 1") < header.index("ε = 3")


def test_a_plan_takes_longer_on_a_busy_machine(monkeypatch):
    from orchestrator.execution import planning

    monkeypatch.setattr(planning.machine_speed, "gemm_rate", lambda: 1e9)
    monkeypatch.setattr(planning.os, "cpu_count", lambda: 2)
    seconds = {}
    for load in (0.0, 20.0):
        monkeypatch.setattr(planning.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        found = planning.plan(from_mapping(STUDY, "the study"))
        seconds[load] = found.seconds
        assert ("which is busy (load 20.0)" in found.as_text()) is (load == 20)
    assert seconds[20.0] >= 10 * seconds[0.0]


def test_a_plan_knows_that_many_small_clients_and_local_steps_take_long(monkeypatch):
    """The same rows and lanes: of 20 clients or of 3,000, with 1 or 20 local steps."""
    from orchestrator.execution import planning

    monkeypatch.setattr(planning.machine_speed, "gemm_rate", lambda: 1e12)
    monkeypatch.setattr(planning.os, "getloadavg", lambda: (0.0, 0.0, 0.0))

    def seconds(clients, steps):
        method = {"dp-fedavg": {"coarse": {"local_steps": [steps]}, "fine": {"local_steps": [steps]}}}
        data = ["synthetic-frozen:9000,100,12,4"]
        study = {**STUDY, "data": data, "partitions": ["iid"], "clients": clients, "methods": [method]}
        return planning.plan(from_mapping(study, "the study")).seconds - planning.START_S

    assert seconds(3000, 20) > 5 * seconds(20, 20)
    assert seconds(3000, 20) > 5 * seconds(3000, 1)


def test_the_time_left_follows_a_machine_that_becomes_busy(monkeypatch):
    """10 trial-rounds a second for a minute, then 1: after another minute only the 1 counts."""
    from types import SimpleNamespace

    from orchestrator.execution import progress

    clock, scheduler, view = [0.0], SimpleNamespace(lane_rounds=0, over=False), progress.View()
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    for second in range(131):
        clock[0] = float(second)
        scheduler.lane_rounds += 10 if second <= 60 else 1
        view.changed(scheduler)
    assert view.rate(scheduler) == pytest.approx(1.0, rel=0.05)


def test_a_small_training_does_not_import_ray():
    program = (
        "import sys, fedsweep\n"
        f"model = fedsweep.train({small.SMALL!r}, method='dp-fedgd', epsilon=8, rounds=2, clients=4)\n"
        "assert model.state == 'done' and 'ray' not in sys.modules, 'ray was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_speed_of_the_machine_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "cache" / "machine-speed.json"
    first = machine_speed.gemm_rate()
    monkeypatch.setattr(machine_speed, "_measured", lambda: 5.0)
    assert machine_speed.gemm_rate() == first > 1e6
    for damaged in ("{", "[]", '{"other machine": 3}', file.read_text().replace(str(first), "-1")):
        file.write_text(damaged)
        assert machine_speed.gemm_rate() == 5.0


def test_help_and_plans_need_no_slow_libraries():
    """`python -m fedsweep` imports the package first."""
    slow = "{'torch', 'pandas', 'ray', 'scipy'} & set(sys.modules)"
    code = f"import sys, fedsweep, orchestrator.cli; assert not {slow}, {slow}; fedsweep.train, fedsweep.plugins"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
