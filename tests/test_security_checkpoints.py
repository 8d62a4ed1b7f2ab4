"""Attacks with prepared checkpoints: the author of one chooses the weights and the rounds of a private trial."""

import io
import os
import pickle
import sqlite3
import stat

import pytest
import small
import torch

from orchestrator.execution import study_run
from orchestrator.execution.progress import LineView
from orchestrator.study.reading import parse
from trainables.errors import UserError
from trainables.federation import checkpoint_key
from trainables.federation.checkpoints import (
    ENDING,
    PAUSED,
    CorruptCheckpointError,
    PackStorage,
    UnusableCheckpointError,
    checkpoint_name,
)
from trainables.federation.hosts import Hosts
from trainables.federation.lane_result import LaneResult
from trainables.federation.problem import ProblemData
from trainables.federation.server import Server

ROUNDS = 4
TEXT = f"""\
name: tiny
data: [{{source: "synthetic-frozen:60,20,4,2"}}]
partitions: [iid]
clients: 2
methods: [{{dp-fedgd: {{coarse: {{learning_rate: [1]}}, fine: {{learning_rate: [1]}}}}}}]
epsilons: [8]
defaults: paper
rounds: {{coarse: {ROUNDS}, fine: {ROUNDS}, confirm: {ROUNDS}}}
evaluate_every: 2
seeds: {{search: 1, contest: [], confirm: [2]}}
resources: {{gpus_per_host: 0}}
"""


def planted(keys, t):
    """A checkpoint of round t with weights that its author has chosen."""
    results = {key: {**vars(LaneResult(key)), "correct": ""} for key in keys}
    content = {"t": t, "lanes": keys, "groups": [len(keys)], "theta": torch.zeros(len(keys), 10), "centre": None}
    content |= {"length": None, "states": [{}], "results": results, "clients": None}
    torch.save(content, buffer := io.BytesIO())
    return buffer.getvalue()


@pytest.mark.parametrize(("key", "t"), [(None, -50), (b"a stranger's key", 2)])
def test_a_planted_checkpoint_changes_neither_results_nor_rounds(key, t, tmp_path, monkeypatch):
    """Even one with a valid digest cannot begin before round 0, which would release more than is accounted for."""
    of = parse(TEXT, "study.yaml", None)
    study_run.run(of, TEXT, tmp_path / "undisturbed", LineView(), backend="local")
    rounds, run_round = [], Server._round
    monkeypatch.setattr(Server, "_round", lambda self, diagnose: (rounds.append(self.t), run_round(self, diagnose)))
    keys = [row[0] for row in values(tmp_path / "undisturbed", "key")]
    for name in keys:
        storage = PackStorage(str(tmp_path / "r" / ".packs"), **({"key": key} if key else {}))
        storage.create()
        storage.save([name], 2, planted([name], t))
    study_run.run(of, TEXT, tmp_path / "r", LineView(), backend="local")
    assert rounds == [*range(ROUNDS)] * len(keys)
    assert values(tmp_path / "r", "key, metrics") == values(tmp_path / "undisturbed", "key, metrics")
    reason = (
        "is corrupt, another user's, or of other code" if key else "cannot be used: ValueError: round -50 is not in"
    )
    log = (tmp_path / "r" / "fedsweep.log").read_text()
    assert f"restarts from round 0: its checkpoint {reason}" in log


def values(folder, columns):
    connection = sqlite3.connect(folder / "ledger.sqlite")
    try:
        return sorted(connection.execute(f"SELECT {columns} FROM trials JOIN trial_keys USING (number)").fetchall())
    finally:
        connection.close()


@pytest.fixture(scope="module")
def whole():
    """Two trials of 4 rounds, and their checkpoint after round 2."""
    of = small.problem()
    trials = [small.trial(of, "dp-scaffold", {"local_steps": 2}, seed=seed, rounds=4) for seed in (1, 2)]
    server = Server(Hosts(1))
    server.open(trials, ProblemData.of(of))
    server.advance(2)
    return trials, ProblemData.of(of), torch.load(io.BytesIO(server.checkpoint()), weights_only=True)


CHANGES = {
    "t": (-50, 5, True, 2.0, None),
    "theta": (torch.zeros(2, 3), torch.zeros(3, 3), None),
    "centre": (torch.zeros(2, 4),),
    "length": (torch.ones(2),),
    "states": ([], [{"m": torch.zeros(3, 10)}], [{"m": 5}]),
    "groups": ([3], [0, 2], [-1, 3]),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in CHANGES.items() for value in values])
def test_values_of_a_checkpoint_are_checked(name, value, whole):
    trials, data, saved = whole
    torch.save({**saved, name: value}, buffer := io.BytesIO())
    with pytest.raises(UnusableCheckpointError):
        Server(Hosts(1)).open(trials, data, buffer.getvalue())


FIELDS = {"state": "won", "rounds": -1, "seconds": -1.0, "metrics": {"accuracy": {-1: 0.5}}}


@pytest.mark.parametrize("field", FIELDS)
def test_results_in_a_checkpoint_are_checked(field, whole):
    trials, data, saved = whole
    results = {key: {**fields, field: FIELDS[field]} for key, fields in saved["results"].items()}
    torch.save({**saved, "results": results}, buffer := io.BytesIO())
    with pytest.raises(UnusableCheckpointError):
        Server(Hosts(1)).open(trials, data, buffer.getvalue())


def test_the_key_travels_with_the_storage(tmp_path):
    """Nodes of a cluster do not have the driver's file. The digest covers the kind of the file, too."""
    storage = PackStorage(str(tmp_path), key=b"x")
    pickle.loads(pickle.dumps(storage)).save(["a"], 1, b"content")
    name = checkpoint_name(["a"])
    assert storage.load(name) == (1, b"content")
    assert "key=" not in repr(storage)
    (tmp_path / (name + ENDING)).rename(tmp_path / (name + PAUSED))
    for stored, ending in ((storage, PAUSED), (PackStorage(str(tmp_path), key=b"y"), PAUSED)):
        with pytest.raises(CorruptCheckpointError):
            stored.load(name, ending)


def test_a_checkpoint_of_other_code_is_not_used(tmp_path):
    """The program was edited or upgraded since: a trial is computed by one version of it."""
    storage = PackStorage(str(tmp_path))
    storage.save(["a"], 1, b"content")
    name = checkpoint_name(["a"])
    assert PackStorage(str(tmp_path)).load(name) == (1, b"content")
    with pytest.raises(CorruptCheckpointError):
        PackStorage(str(tmp_path), code="of another version").load(name)


def test_the_key_is_private_and_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    user_key, file = checkpoint_key.user_key.__wrapped__, tmp_path / "fedsweep" / "checkpoint.key"
    first = user_key()
    assert user_key() == first == file.read_bytes()
    assert len(first) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    second = user_key()
    assert second != first, "others may have read it"
    file.unlink()
    file.symlink_to(tmp_path / "other")
    (tmp_path / "other").write_bytes(second)
    assert user_key() != second
    assert (tmp_path / "other").read_bytes() == second
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert user_key() != user_key(), "it cannot be kept"


def test_a_pipe_in_place_of_a_checkpoint_does_not_block(tmp_path):
    storage, name = PackStorage(str(tmp_path)), checkpoint_name(["a"])
    for ending in (ENDING, PAUSED):
        os.mkfifo(tmp_path / (name + ending))
        with pytest.raises(UserError, match="is not a plain file"):
            storage.load(name, ending)
    assert storage.trials_by_checkpoint() == storage.paused_lanes() == {}


def test_a_checkpoint_that_a_container_cannot_hold_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("trainables.federation.machine_memory.CGROUP", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text("4000\n")
    name = checkpoint_name(["a"])
    (tmp_path / (name + ENDING)).write_bytes(bytes(1001))
    with pytest.raises(UserError, match="is larger than 1,000 bytes"):
        PackStorage(str(tmp_path)).load(name)


def test_a_huge_sparse_checkpoint_is_not_read(tmp_path):
    storage, name = PackStorage(str(tmp_path)), checkpoint_name(["a"])
    with (tmp_path / (name + ENDING)).open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(UserError, match="is larger than"):
        storage.load(name)
    assert storage.trials_by_checkpoint() == {}
