"""The local backend: a sweep in this process, without Ray. That its results equal Ray's is tested in test_sweep.py."""

import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository_files import DOCS, REPOSITORY

from orchestrator.execution import memory_waits, study_run
from orchestrator.execution.progress import View
from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import PACKS, results_location
from orchestrator.study.reading import load, parse
from trainables.errors import UserError
from trainables.federation import checkpoint_writer, pack_runner
from trainables.federation.client_host import ClientHost
from trainables.federation.server import Server

TEXT = """\
name: local
data: [{source: "synthetic-frozen:400,100,6,3", label: tiny}]
partitions: [iid]
clients: 4
methods:
  - dp-fedgd: {coarse: {learning_rate: [0.1, 0.3, 1, 3]}, fine: {learning_rate: [0.5]}}
  - dp-scaffold: {coarse: {server_learning_rate: [0.3, 1]}, fine: {server_learning_rate: [0.5]}}
epsilons: [40]
defaults: paper
privacy: {clip: 2}
rounds: {coarse: 4, fine: 4, confirm: 6}
seeds: {search: 42, contest: [], confirm: [42, 7]}
search: {refine: table}
evaluate_every: 2
resources: {gpus_per_host: 0}
"""


def run(folder: Path, view: View | None = None, text: str = TEXT, **options) -> study_run.Finished:
    study = parse(text, "local.yaml", Path.cwd())
    return study_run.run(study, text, folder, view or View(), backend="local", **options)


def results(folder: Path) -> dict[str, bytes]:
    files = [*sorted((folder / "tables").rglob("*")), folder / "best.yaml"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files if file.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder).complete
    assert not (folder / PACKS).exists()
    return results(folder)


COMMAND = """\
import sys
from orchestrator.cli import main
try:
    main()
finally:
    assert "ray" not in sys.modules, "Ray was imported"
"""


@pytest.mark.parametrize("command", ["run", "resume"])
def test_ray_is_never_imported(tmp_path, command):
    file = tmp_path / "study.yaml"
    file.write_text(TEXT)
    folder = tmp_path / "results"
    what = [file, "--results", folder] if command == "run" else [folder]
    if command == "resume":
        run(folder, stop_after_s=1e-9)
    ran = subprocess.run(
        [sys.executable, "-c", COMMAND, command, *map(str, what), "--backend", "local"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "Ray was imported" not in ran.stderr
    assert (folder / "best.yaml").is_file()


def test_a_cluster_address_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^address = 'auto': the local backend runs in this process"):
        run(tmp_path / "results", address="auto")


def test_an_unknown_backend_is_refused(tmp_path):
    with pytest.raises(UserError, match="backend = 'slurm'"):
        study_run.run(parse(TEXT, "local.yaml", Path.cwd()), TEXT, tmp_path, View(), backend="slurm")


def test_gpus_that_are_not_there_are_refused(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match=r"^resources: gpus_per_host = 1, and this process sees no GPU$"):
        run(tmp_path, text=TEXT.replace("gpus_per_host: 0", "gpus_per_host: 1"))


def test_a_failing_trial_is_isolated_and_recorded(tmp_path, monkeypatch):
    """As on Ray: its pack is retried twice, then split until the trial is alone. All others finish."""
    progress = Server.progress

    def fail(self, until):
        if any(trial.hyperparameters.get("learning_rate") == 3 for trial in self.trials):
            raise RuntimeError("on purpose")
        return progress(self, until)

    monkeypatch.setattr(Server, "progress", fail)
    finished = run(tmp_path)
    assert (finished.complete, finished.failed) == (True, 1)
    with Ledger.read(tmp_path) as ledger:
        rows = ledger.rows(ledger.outcomes()).values()
        sizes = [failure[0] for failure in ledger.failures()]
    (failed,) = [row for row in rows if row.state == "failed"]
    assert failed.trial.hyperparameters["learning_rate"] == 3
    assert failed.reason == "RuntimeError: on purpose"
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[:3] == sizes[:1] * 3, "one attempt and two retries"
    assert sizes[-3:] == [1, 1, 1]


def test_packs_that_run_out_of_memory_are_split(tmp_path, monkeypatch, undisturbed):
    host_round = ClientHost.round

    def limited(self, work, *arguments):
        if len(work.lanes) > 1:
            raise torch.OutOfMemoryError("too many lanes")
        return host_round(self, work, *arguments)

    monkeypatch.setattr(ClientHost, "round", limited)
    finished = run(tmp_path)
    assert (finished.complete, finished.failed) == (True, 0)
    assert results(tmp_path) == undisturbed
    with Ledger.read(tmp_path) as ledger:
        assert ledger.failures() == []


def test_a_trial_waits_for_memory_that_another_program_uses(tmp_path, monkeypatch, undisturbed):
    """A trial that is alone in its pack does not fit at its first two attempts."""
    host_round, attempted = ClientHost.round, []

    def limited(self, work, *arguments):
        attempted.append(work.lanes)
        if attempted[0] == work.lanes and attempted.count(work.lanes) <= 2:
            raise torch.OutOfMemoryError("the memory is in use")
        return host_round(self, work, *arguments)

    monkeypatch.setattr(ClientHost, "round", limited)
    monkeypatch.setattr(memory_waits, "WAIT_S", 0.2)
    finished = run(tmp_path, text=TEXT.replace("gpus_per_host: 0", "gpus_per_host: 0, lanes_per_pack: 1"))
    assert (finished.complete, finished.failed) == (True, 0)
    assert results(tmp_path) == undisturbed
    with Ledger.read(tmp_path) as ledger:
        assert [reason for *_, reason in ledger.failures()] == ["one lane does not fit into the device's memory"] * 2


class Messages(View):
    def __init__(self) -> None:
        super().__init__()
        self.sentences: list[str] = []

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)


def test_ctrl_c_finishes_the_pack_in_flight_and_resume_runs_the_others(tmp_path, undisturbed):
    class Interrupts(Messages):
        def changed(self, scheduler):
            os.kill(os.getpid(), signal.SIGINT)
            super().changed(scheduler)

    view = Interrupts()
    assert not run(tmp_path, view).complete
    assert view.sentences.count("stopping after the packs in flight; another Ctrl-C stops at once") == 1
    with Ledger.read(tmp_path) as ledger:
        outcomes = ledger.outcomes()
    assert outcomes
    assert run(tmp_path).complete
    assert results(tmp_path) == undisturbed
    with Ledger.read(tmp_path) as ledger:
        assert outcomes.items() <= ledger.outcomes().items()


def test_a_time_limit_and_a_stop_request_end_the_run(tmp_path, undisturbed):
    assert not run(tmp_path, stop_after_s=1e-9).complete

    class Cancels(View):
        def changed(self, scheduler):
            results_location(tmp_path).request_stop()

    assert not run(tmp_path, Cancels()).complete
    assert run(tmp_path).complete
    assert results(tmp_path) == undisturbed


def test_a_stop_request_can_end_the_run_at_once(tmp_path, undisturbed):
    """`fedsweep cancel --now`: no pack ends any more."""

    class Cancels(View):
        def changed(self, scheduler):
            results_location(tmp_path).request_stop(now=True)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Cancels())
    with Ledger.read(tmp_path) as ledger:
        before = len(ledger.outcomes())
        assert set(ledger.trials_by_node()) <= {platform.node()}
    assert run(tmp_path).complete
    assert results(tmp_path) == undisturbed
    with Ledger.read(tmp_path) as ledger:
        assert before < len(ledger.outcomes())
        assert ledger.trials_by_node() == {platform.node(): len(ledger.outcomes())}


def test_a_second_ctrl_c_stops_at_once_and_packs_resume_from_their_checkpoints(tmp_path, monkeypatch, undisturbed):
    monkeypatch.setattr(checkpoint_writer, "EVERY_S", -1.0)
    monkeypatch.setattr(checkpoint_writer, "SHARE", 1e9)
    monkeypatch.setattr(pack_runner, "CHUNK_S", 0.0)

    class InterruptsTwice(View):
        def changed(self, scheduler):
            if any(pack.checkpoint for pack in scheduler.in_flight.values()):
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, InterruptsTwice())
    assert list((tmp_path / PACKS).glob("*.checkpoint"))
    assert run(tmp_path).complete
    assert "resumes from its last checkpoint" in (tmp_path / "fedsweep.log").read_text()
    assert results(tmp_path) == undisturbed
    assert not (tmp_path / PACKS).exists()


def test_the_number_of_threads_of_the_caller_is_restored(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_trial_takes_the_documented_path(tmp_path):
    """A run calls the functions in the table of docs/architecture.md in this order; those of Ray only exist."""
    table = re.findall(r"^\| \d+ \| `(.+?)` \| `(.+?)` \|", (DOCS / "architecture.md").read_text(), flags=re.MULTILINE)
    calls: list[str] = []

    def note_call(frame, event, argument):
        code, values = frame.f_code, frame.f_locals
        if event == "call" and code.co_filename.startswith(str(REPOSITORY)):
            owner = values.get("self", values.get("cls"))
            classes = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
            names = {f"{kind.__name__}.{code.co_name}".removesuffix(".__init__") for kind in classes}
            calls.extend(
                called
                for called, file in table
                if called in names or (code.co_name == called and code.co_filename == str(REPOSITORY / file))
            )

    (tmp_path / "study.yaml").write_text(TEXT)
    sys.setprofile(note_call)
    try:
        study, text = load(str(tmp_path / "study.yaml"))
        study_run.run(study, text, tmp_path / "results", View(), backend="local")
    finally:
        sys.setprofile(None)
    remaining = iter(calls)
    for called, file in table:
        assert f" {called.split('.')[-1]}" in (REPOSITORY / file).read_text()
        assert "ray" in file or called in remaining, f"{called} is not called after the steps before it"
