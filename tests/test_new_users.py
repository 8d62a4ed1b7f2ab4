"""Faults that new users met: messages, hints and exit codes of the first hour."""

import shlex
import sqlite3
import warnings
from importlib import metadata

import pytest
import small

import fedsweep as face
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

    def small_disk(uri, of):
        connection = connect(uri, of)
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
        "the study: name: it should have at most 64 characters: letters from a to z, digits and . _ - (found 'étude π')"
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

    model = face.train(small.SMALL, method="dp-fedgd", epsilon=8, rounds=2, clients=4)
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

    def train():
        import fedsweep

        try:
            return fedsweep.train(data, method="dp-fedgd", epsilon=8, rounds=2, clients=4).state
        except fedsweep.UserError as error:
            return str(error)

    outcomes = []
    for bundles in ([{"CPU": 1}], [{"CPU": 1}, {"CPU": 1}]):
        group = placement_group(bundles)
        inside = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
        task = ray.remote(train).options(num_cpus=1, scheduling_strategy=inside)
        outcomes.append(ray.get(task.remote(), timeout=300))
        ray.util.remove_placement_group(group)
    assert "reserves no CPU for client hosts, and would wait forever" in outcomes[0]
    assert outcomes[1] == "done"
