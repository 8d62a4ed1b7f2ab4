"""Parts of a study that were run separately and merged equal one run."""

from dataclasses import replace
from pathlib import Path

import pytest
from nodes import wait_for
from simulated_search import GD, drive, near, row, study

from orchestrator.commands.options import seconds_of, shard_of
from orchestrator.execution import study_run
from orchestrator.execution.merging import merge
from orchestrator.execution.sweep import Sweep
from orchestrator.report.tables import write_tables
from orchestrator.results import status
from orchestrator.results.ledger import DataNames, Ledger
from orchestrator.results.locations import STOP_FILES, results_location
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.study import Study
from trainables.errors import UserError

NAMES = DataNames(["ill", "healthy"], ["a", "b"])


def part(folder: Path, of: Study, k: int, n: int) -> None:
    """Every n-th cell, like `run --shard`."""
    prepared = PreparedStudy.prepare(of)
    with Ledger.write(folder) as ledger:
        ledger.add_names({"toy": NAMES})
        study_run._record_study(ledger, prepared, "by hand")
        sweep = Sweep(replace(prepared, cells=prepared.cells[k - 1 :: n]), ledger)
        while not sweep.finished:
            rows = [row(trial, near(0.3)(trial)) for trial in sweep.waiting.values()]
            ledger.add(rows)
            sweep.ended({r.key: (r.state, r.accuracy, r.loss) for r in rows})


def shown(folder: Path) -> dict[str, bytes]:
    with Ledger.read(folder) as ledger:
        write_tables(ledger, folder)
    files = [*sorted((folder / "tables").rglob("*")), folder / "best.yaml"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files if file.is_file()}


def test_merged_parts_equal_one_run(tmp_path):
    of = study(epsilons=[8, 4, 2])
    part(tmp_path / "whole", of, 1, 1)
    parts = [tmp_path / f"part {k}" for k in (1, 2, 3, 4)]
    for k, folder in enumerate(parts, 1):
        part(folder, of, k, 4)
        assert not status.read(folder)["finished"]
    merge(parts[:3], tmp_path / "merged")
    assert not status.read(tmp_path / "merged")["finished"]
    merge([parts[3], parts[0]], tmp_path / "merged")
    assert status.read(tmp_path / "merged")["finished"]
    assert shown(tmp_path / "merged") == shown(tmp_path / "whole")
    assert (tmp_path / "merged" / "study.yaml").read_text() == "by hand"
    with Ledger.read(tmp_path / "merged") as ledger:
        assert ledger.names() == {"toy": NAMES}
    assert drive(tmp_path / "merged", of, near(0.3)).trials == [], "nothing is left to run"


def test_a_merge_corrects_winners(tmp_path):
    """They follow from the trials, whatever the folder held before."""
    part(tmp_path / "one", study(methods=[GD]), 1, 1)
    merge([tmp_path / "one"], tmp_path / "merged")
    with Ledger.write(tmp_path / "merged") as ledger:
        correct = ledger.winners()
        for cell, variant in correct:
            ledger.set_winner(cell, variant, [])
        assert ledger.winners() != correct
    merge([tmp_path / "one"], tmp_path / "merged")
    with Ledger.read(tmp_path / "merged") as ledger:
        assert ledger.winners() == correct


def test_parts_of_other_studies_are_refused(tmp_path):
    part(tmp_path / "one", study(methods=[GD]), 1, 1)
    part(tmp_path / "other", study(methods=[GD], clients=5), 1, 1)
    with pytest.raises(UserError, match=r"other is of another study: the study has clients = 5, the folder was made w"):
        merge([tmp_path / "one", tmp_path / "other"], tmp_path / "merged")
    with Ledger.read(tmp_path / "merged") as ledger:
        assert ledger.study() is None, "all parts or none"
    with pytest.raises(UserError, match="holds no ledger"):
        merge([tmp_path / "nowhere"], tmp_path / "nothing")


TWO_CELLS = """\
name: two
data: ["synthetic-frozen:400,100,6,3"]
partitions: [iid]
clients: 4
methods: [{dp-fedgd: {coarse: {learning_rate: [0.1, 0.5]}, fine: {learning_rate: [0.2]}}}]
epsilons: [8, 4]
defaults: paper
rounds: {coarse: 4, fine: 4, confirm: 4}
seeds: {search: 42, contest: [], confirm: [7]}
search: {refine: table}
resources: {gpus_per_host: 0}
"""


@pytest.mark.ray
def test_shards_that_were_stopped_and_resumed_as_commands(local_ray, tmp_path, fedsweep):
    """Two halves, of which the first is stopped before its first pack and begun again, and their merge: it is whole,
    and who computed what is known of all."""
    file = tmp_path / "two.yaml"
    file.write_text(TWO_CELLS)
    first = ("run", file, "--results", tmp_path / "part 1", "--shard", "1/2")
    assert fedsweep(*first, "--stop-after", "0.000001s")[0] == 130
    assert status.read(tmp_path / "part 1")["trials_ended"] == 0
    assert fedsweep(*first)[0] == 0
    assert fedsweep("run", file, "--results", tmp_path / "part 2", "--shard", "2/2")[0] == 0
    code, _, err = fedsweep("merge", tmp_path / "part 1", tmp_path / "part 2", "--results", tmp_path / "merged")
    assert code == 0, err
    found = status.read(tmp_path / "merged")
    assert found["finished"]
    assert list(found["computed_on"].values()) == [found["trials"]["done"]]
    assert Path(found["worker_logs"]).name == "logs"


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "a/b", "1/0", "-1/4", "1/2/3"])
def test_an_invalid_shard_is_refused(text):
    with pytest.raises(UserError, match=f"^shard = '{text}' is not K/N"):
        shard_of(text)
    assert (shard_of(None), shard_of("2/8")) == ((1, 1), (2, 8))


@pytest.mark.parametrize("text", ["", "2", "h", "2w", "-1h", "0s", "nan h"])
def test_an_invalid_time_is_refused(text):
    with pytest.raises(UserError, match=r"stop.after"):
        seconds_of(text)
    assert [seconds_of(time) for time in (None, "30s", "90m", "2h", "1.5d")] == [None, 30, 5400, 7200, 129600]


@pytest.mark.parametrize("remote", [False, True])
def test_cancelling(tmp_path, fedsweep, monkeypatch, remote):
    """The running driver gets the request once, on this machine or through the storage."""
    monkeypatch.setattr("orchestrator.results.locations.HEARTBEAT_S", 0.01)
    where = f"file://{tmp_path}/results" if remote else str(tmp_path / "results")
    with results_location(where).open_for_writing() as running, Ledger.write(running.folder) as ledger:
        ledger.add_study(study().model_dump_json(), "by hand")
        running.notify_recorded(1)
        if remote:
            wait_for((tmp_path / "results" / "ledger.sqlite").exists, "the ledger was uploaded")
        assert not running.stop_requested()
        code, _, err = fedsweep("cancel", where)
        assert (code, "was asked to stop" in err) == (0, True)
        wait_for(lambda: running.stop_requested() == "after packs", "the request arrived")
        code, _, err = fedsweep("cancel", where, "--now")
        assert (code, "was asked to stop now" in err) == (0, True)
        wait_for(lambda: running.stop_requested() == "now", "the request arrived")
        assert not [name for name in STOP_FILES.values() if (tmp_path / "results" / name).exists()]
    code, _, err = fedsweep("cancel", where)
    assert (code, f"no sweep is running in {where}" in err) == (2, True)
