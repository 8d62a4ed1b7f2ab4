"""Trials that continue shorter ones: the same bits as a run from round 0, and fewer rounds."""

from pathlib import Path

import pytest
import small
from interrupting import StopAfterAPack
from simulated_search import study

from orchestrator.execution import study_run
from orchestrator.execution.progress import View
from orchestrator.results.ledger import Ledger
from orchestrator.study.reading import as_text
from trainables.federation import pack_runner
from trainables.federation.checkpoints import UnusableCheckpointError
from trainables.federation.hosts import Hosts
from trainables.federation.problem import ProblemData
from trainables.federation.server import Server
from trainables.federation.trial_spec import Preprocess

METHODS = {
    "dp-fedgd": [{"learning_rate": 0.3}, {"learning_rate": 2}],
    "dp-fedsofim": [{"learning_rate": 0.3, "rho": 1}, {"learning_rate": 1, "rho": 5}],
    "dp-fedadam": [{"learning_rate": 0.1}, {"learning_rate": 0.01, "beta1": 0.5}],
    "dp-scaffold": [{"server_learning_rate": 0.3}, {"server_learning_rate": 1}],  # clients have a state
}


def ended(trials, problem, *, paused=(), hosts=1) -> Server:
    server = Server(Hosts(hosts, "cpu"))
    server.open(trials, ProblemData.of(problem), paused=paused)
    server.advance(server.rounds)
    return server


def stopped(trial, after: int):
    return trial.model_copy(update={"stop_after": after})


def shown(server: Server) -> dict:
    return {key: (r.state, r.rounds, r.metrics, r.correct) for key, r in server.results.items()}


PREPROCESSED = {"plain": Preprocess(), "centred": Preprocess(center=0.1), "scaled": Preprocess(center=0.1, scale=0.1)}


@pytest.mark.parametrize("features", PREPROCESSED)
@pytest.mark.parametrize("method", METHODS)
def test_lanes_of_several_packs_continue_with_the_same_bits(small_problem, method, features):
    """Round 7 is no round of evaluation, and the packs have other lanes, hosts and orders than the one that follows."""
    trials = [
        small.trial(small_problem, method, hypers, seed=seed).model_copy(update={"preprocess": PREPROCESSED[features]})
        for hypers in METHODS[method]
        for seed in (1, 2, 3)
    ]
    whole = shown(ended(trials, small_problem))
    parts = [ended([stopped(trial, 7) for trial in part], small_problem) for part in (trials[:4], trials[4:])]
    survivors = [trials[5], trials[1], trials[0]]
    longer = ended([stopped(t, 9) for t in survivors], small_problem, paused=[p.paused()[1] for p in parts], hosts=2)
    last = ended(survivors[:2], small_problem, paused=[longer.paused()[1]])
    assert shown(last) == {trial.key: whole[trial.key] for trial in survivors[:2]}


def test_a_lane_that_was_not_saved_cannot_continue(small_problem):
    trials = [small.trial(small_problem, "dp-fedgd", {"learning_rate": rate}) for rate in (0.3, 1)]
    _, content = ended([stopped(trials[0], 7)], small_problem).paused()
    with pytest.raises(UnusableCheckpointError):
        ended(trials, small_problem, paused=[content])


def test_only_trials_that_stop_early_are_saved(small_problem):
    assert ended([small.trial(small_problem, "dp-fedgd")], small_problem).paused() is None


# ---- in a sweep

HALVING = {
    "strategies": ["random", "halving"],
    "trials": 3,
    "random": {"seed": 7},
    "halving": {"rungs": 3, "keep": 0.5},
}


def halving():
    return study(
        methods=["dp-scaffold"],
        rounds={"fine": 12, "confirm": 12},
        evaluate_every=5,
        seeds={"search": [1, 2], "contest": [], "confirm": [42]},
        search=HALVING,
        resources={"gpus_per_host": 0, "lanes_per_pack": 4},
    )


def run(folder: Path, view: View | None = None) -> study_run.Finished:
    of = halving()
    return study_run.run(of, as_text(of), folder, view or View(), backend="local")


@pytest.fixture
def rounds(monkeypatch) -> list[int]:
    """The number of lanes of every round that is computed."""
    computed: list[int] = []
    one_round = Server._round

    def counted(self, diagnose):
        computed.append(len(self.trials))
        one_round(self, diagnose)

    monkeypatch.setattr(Server, "_round", counted)
    return computed


def tables(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / "tables").iterdir()}


def test_survivors_continue_and_the_tables_are_the_same_bytes(tmp_path, rounds, monkeypatch):
    assert run(tmp_path / "continued").complete
    continued = sum(rounds)
    rounds.clear()
    with monkeypatch.context() as patch:
        patch.setattr(pack_runner.PackRunner, "_save_paused", lambda self: "")
        assert run(tmp_path / "restarted").complete
    assert tables(tmp_path / "continued") == tables(tmp_path / "restarted")
    with Ledger.read(tmp_path / "continued") as ledger:
        stages = ledger.stages()
    last = {"rung-1": 3, "rung-2": 6, "rung-3": 12}
    saved = sum(len(keys) * last[stage] // 2 for (_, _, stage), keys in stages.items() if stage in ("rung-2", "rung-3"))
    assert saved > 0
    assert sum(rounds) - continued == saved, "rungs 2 and 3 repeat no round"
    assert not list((tmp_path / "continued").rglob("*.paused")), "nothing is left behind"


def test_an_interrupted_sweep_continues_its_survivors(tmp_path, rounds):
    assert run(tmp_path / "whole").complete
    without = sum(rounds)
    rounds.clear()
    stops = 0
    while not run(tmp_path / "part", StopAfterAPack()).complete:
        stops += 1
    assert stops > 2
    assert tables(tmp_path / "part") == tables(tmp_path / "whole")
    assert sum(rounds) == without, "no round is computed twice"


def test_a_lost_file_costs_rounds_but_changes_no_result(tmp_path, rounds, monkeypatch):
    assert run(tmp_path / "whole").complete
    without = sum(rounds)
    rounds.clear()
    monkeypatch.setattr(pack_runner.PackRunner, "_load_paused", lost(pack_runner.PackRunner._load_paused))
    assert run(tmp_path / "part").complete
    assert sum(rounds) > without
    assert tables(tmp_path / "part") == tables(tmp_path / "whole")
    assert "restarts from round 0: the state of shorter trials" in (tmp_path / "part" / "fedsweep.log").read_text()


def lost(load):
    def load_after_loss(self, names):
        for file in Path(self._storage.path).glob("*.paused"):
            file.write_bytes(b"damaged")
        return load(self, names)

    return load_after_loss
