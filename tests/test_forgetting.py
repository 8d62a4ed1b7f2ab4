"""`fedsweep forget --node`: its trials run again, and stages that were opened because of them are decided again."""

import contextlib
import math
import os
import sqlite3
import sys
from dataclasses import replace

import numpy as np
import pytest
from handmade_rows import HAS_KEY
from plugin_registry import temporary_plugins
from simulated_search import GD, SOFIM, drive, near, study

from orchestrator.results.forgetting import Forgotten, forget_node
from orchestrator.results.ledger import Ledger
from trainables import plugins
from trainables.errors import UserError


def outcomes(folder) -> dict:
    with Ledger.read(folder) as ledger:
        return ledger.outcomes()


def bad_node(trial) -> str:
    """One coarse trial of DP-FedGD ran on another node."""
    return "bad" if (trial.method, trial.hyperparameters["learning_rate"], trial.rounds) == BAD else "good"


BAD = ("dp-fedgd", 1, 4)
STRATEGIES = {
    "grid": {},
    "optuna": {"search": {"strategies": ["optuna"], "trials": 6}},
    "halving": {"search": {"strategies": ["halving"], "trials": 9}},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_results_lead_to_the_same_stages(tmp_path, strategy):
    """Every third trial is forgotten, and only these run again, with the longer ones that continue them."""
    of = study(methods=[GD, SOFIM], **STRATEGIES[strategy])
    names = iter(["bad", "good", "good"] * 1000)
    first = drive(tmp_path, of, near(0.3), node_of=lambda trial: next(names))
    before = outcomes(tmp_path)
    with Ledger.read(tmp_path) as ledger:
        bad = {key for key, origin in ledger.origins().items() if origin.nodes == ["bad"]}
    shortest: dict[str, int] = {}
    for trial in sorted(first.trials, key=lambda trial: -trial.last_round):
        if trial.key in bad:
            shortest[trial.full_key] = trial.last_round
    longer = {t.key for t in first.trials if t.last_round > shortest.get(t.full_key, t.last_round)}
    assert bool(longer - bad) == (strategy == "halving")
    bad |= longer
    assert forget_node(tmp_path, "bad").trials == len(bad) > 3
    again = drive(tmp_path, of, near(0.3))
    assert {trial.key for trial in again.trials} == bad
    assert (again.finished, again.stages, again.choices) == (True, first.stages, first.choices)
    assert outcomes(tmp_path) == before


def test_other_results_lead_to_other_stages(tmp_path):
    """The node had inflated a score, so that another configuration won: afterwards everything is as if the node had
    never been there, except that results that are not needed are kept."""
    of = study(methods=[GD, SOFIM])
    honest = drive(tmp_path / "honest", of, near(0.3))

    def inflated(trial):
        return ("done", 99.0, 1.0) if bad_node(trial) == "bad" else near(0.3)(trial)

    wrong = drive(tmp_path / "wrong", of, inflated, node_of=bad_node)
    assert wrong.choices != honest.choices
    assert forget_node(tmp_path / "wrong", "bad") == Forgotten(trials=1, stages=2), "fine and confirm of one cell"
    mended = drive(tmp_path / "wrong", of, near(0.3))
    assert (mended.stages, mended.choices) == (honest.stages, honest.choices)
    assert outcomes(tmp_path / "honest").items() <= outcomes(tmp_path / "wrong").items()


def test_with_warm_start_the_contests_of_other_budgets_are_decided_again(tmp_path):
    of = study(methods=[GD], epsilons=[4, 8], seeds={"contest": [5, 6]}, search={"warm_start": True})
    at_eight = lambda trial: "bad" if trial.privacy.epsilon == 8 and trial.rounds == 4 else "good"  # noqa: E731
    first = drive(tmp_path, of, near(0.3), node_of=at_eight)
    forgotten = forget_node(tmp_path, "bad")
    assert forgotten.stages == 1 + 2 * 2, "the fine stage of one cell; contest and confirm of both"
    again = drive(tmp_path, of, near(0.3))
    assert (again.finished, again.stages) == (True, first.stages)
    assert len(again.trials) == forgotten.trials


def test_a_node_that_has_computed_nothing_is_refused(tmp_path, fedsweep):
    drive(tmp_path, study(methods=[GD]), near(0.3), node_of=bad_node)
    code, _, err = fedsweep("forget", tmp_path, "--node", "10.0.0.9")
    assert code == 2
    assert f"node = '10.0.0.9' has computed no trial of {tmp_path}; nodes: bad, good" in err
    code, _, err = fedsweep("forget", tmp_path, "--node", "bad")
    assert code == 0
    assert "forgot 1 trials of node bad; 2 stages will be decided again. To run the trials again and " in err
    with pytest.raises(UserError, match=r"holds no ledger"):
        forget_node(tmp_path / "nothing", "bad")
    assert not (tmp_path / "nothing").exists()


# ---- an edited plug-in


PLUGIN = """
from trainables.methods.dp_fedgd import DPFedGD

class Edited(DPFedGD):
    name = "dp-edited"
    def step(self, theta, *rest):
        return super().step(theta, *rest)  # RATE
"""
EDITED = """\
name: edited
data: [{source: "synthetic-frozen:400,100,6,3", label: toy}]
partitions: [iid]
clients: 2
methods:
  - dp-edited: {label: edited, coarse: {learning_rate: [0.1, 1]}, fine: {learning_rate: [0.3]}}
  - dp-fedgd: {coarse: {learning_rate: [0.1, 1]}, fine: {learning_rate: [0.3]}}
epsilons: [40]
defaults: paper
privacy: {clip: 2}
rounds: {coarse: 3, fine: 3, confirm: 3}
seeds: {search: 42, contest: [], confirm: [7]}
search: {refine: table}
resources: {gpus_per_host: 0}
"""


def test_resuming_after_a_plug_in_was_edited_is_told_and_runs_its_trials_again(tmp_path, fedsweep, monkeypatch):
    """The trials of other methods are kept."""
    file, study_file = tmp_path / "edited_plugin.py", tmp_path / "edited.yaml"
    study_file.write_text(EDITED)

    def run(version: str) -> tuple[int, str]:
        file.write_text(PLUGIN.replace("# RATE", version))
        monkeypatch.setenv(plugins.VARIABLE, "")
        sys.modules.pop("edited_plugin", None)
        with temporary_plugins():
            code, _, err = fedsweep(
                "run", study_file, "--results", tmp_path / "results", "--backend", "local", "--import", file
            )
        sys.modules.pop("edited_plugin", None)
        return code, err

    code, err = run("")
    assert (code, "has changed since" in err) == (0, False), err
    first = outcomes(tmp_path / "results")
    code, err = run("* 1.5")
    assert code == 0, err
    assert "note: plug-in edited_plugin has changed since this folder was run; what it computes runs again" in err
    assert "4 trials to run, 4 done before" in err
    after = outcomes(tmp_path / "results")
    assert first.items() <= after.items()
    code, err = run("* 1.5")
    assert (code, "has changed since" in err) == (0, False), err
    assert outcomes(tmp_path / "results") == after


# ---- damaged rows


COLUMNS = {
    "epsilon_local": "epsilon_local + 1",
    "accuracy": "accuracy + 0.01",
    "metrics": "replace(metrics, '4', '3')",
    "spec": "spec || ' '",
    "correct": "x'ff'",
    "rounds": "rounds + 1",
    "state": "'diverged'",
}


@pytest.mark.parametrize("column", COLUMNS)
def test_a_changed_digit_is_detected_and_repaired(tmp_path, column, fedsweep):
    """By `check`, `tables` and `resume`; the repaired study runs the trial again and is as before."""
    of = study(methods=[GD])
    before = drive(tmp_path, of, near(0.3))
    code, out, _ = fedsweep("check", tmp_path)
    assert (code, out) == (0, "every recorded trial matches its checksum\n")
    victim = before.trials[1].key
    with sqlite3.connect(tmp_path / "ledger.sqlite") as connection:
        connection.execute(f"UPDATE trials SET {column} = {COLUMNS[column]} WHERE {HAS_KEY}", (victim,))
    connection.close()
    for command in ("tables", "resume"):
        code, _, err = fedsweep(command, tmp_path)
        assert code == 2
        assert f"the ledger in {tmp_path} is damaged: the row of trial '{victim}' does not match its checksum" in err
    code, out, _ = fedsweep("check", tmp_path)
    assert (code, out.splitlines()[0]) == (1, f"damaged: trial '{victim}'")
    assert ("damaged: the counts of trials that status shows" in out) == (column == "state")
    code, _, err = fedsweep("check", tmp_path, "--repair")
    assert (code, "1 trials are forgotten" in err) == (0, True)
    again = drive(tmp_path, of, near(0.3))
    assert [trial.key for trial in again.trials] == [victim]
    assert again.stages == before.stages
    assert fedsweep("check", tmp_path)[0] == 0


def test_a_row_without_a_key_is_damaged(tmp_path, fedsweep):
    drive(tmp_path, study(methods=[GD]), near(0.3))
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection, connection:
        connection.execute("UPDATE trials SET number = 10000 WHERE number = (SELECT min(number) FROM trials)")
    assert fedsweep("check", tmp_path)[0] == 1
    assert fedsweep("check", tmp_path, "--repair")[0] == 0
    drive(tmp_path, study(methods=[GD]), near(0.3))
    assert fedsweep("check", tmp_path)[0] == 0


def test_rows_with_numbers_that_sqlite_stores_differently_match_their_checksums(tmp_path):
    drive(tmp_path / "any", study(methods=[GD]), near(0.3), stop_after=1)
    with Ledger.read(tmp_path / "any") as ledger:
        (plain,) = ledger.rows(ledger.outcomes()).values()
    unusual = [
        replace(plain, key="0" * 24, accuracy=71, loss=math.nan, epsilon_claimed=math.inf, seconds=np.float64(1.5)),
        replace(plain, key="1" * 24, accuracy=None, loss=None, epsilon_claimed=1, metrics={"loss": {5: math.inf}}),
    ]
    with Ledger.write(tmp_path) as ledger:
        ledger.add(unusual)
        assert ledger.damaged_rows() == []


# ---- folders that cannot be written


def test_commands_that_read_a_folder_which_they_cannot_write(tmp_path, fedsweep, monkeypatch):
    """`best` answers, and writes nothing; `report` and `export` say how to choose another place."""
    drive(tmp_path, study(methods=[GD]), near(0.3))
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        code, out, err = fedsweep("best", tmp_path)
    assert (code, "learning_rate=0.3" in out) == (0, True), err
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "file").touch()
    for command, option in (("report", "--output"), ("export", "--out")):
        code, _, err = fedsweep(command, tmp_path, option, tmp_path / "file" / "below")
        assert code == 2
        assert err.endswith(f"; choose another place with {option}.\n")
        assert f"{tmp_path}/file" in err
