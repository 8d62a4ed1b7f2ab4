"""Whole sweeps, on Ray and on the local backend: the same study gives the same tables, however it is packed."""

import contextlib
import csv
import io
import json
import os
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from handmade_rows import HAS_KEY

from orchestrator.execution import planning, study_run
from orchestrator.execution.backends import ray as ray_backend
from orchestrator.execution.progress import JsonView, SweepProgress, View
from orchestrator.results import status
from orchestrator.results.ledger import Ledger, Row
from orchestrator.study.reading import parse
from orchestrator.study.study import Study
from trainables.errors import UserError

pytestmark = pytest.mark.ray

GD = "tiny / iid / DP-FedGD / eps 40"
SOFIM = "tiny / iid / DP-FedSOFIM / eps 40"
TEST_ROWS = 100
TEXT = """\
name: tiny
data: [{source: "synthetic-frozen:400,100,6,3", label: tiny}]
partitions: [iid]
clients: 4
methods:
  - dp-fedgd:
      coarse: {learning_rate: [0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 1.0e+38]}
      fine: {learning_rate: [0.05, 0.1, 0.5]}
  - dp-fedsofim:
      coarse: {learning_rate: [0.1, 1], rho: [0.1, 0.5, 1, 5, 10], beta: [0.9]}
      fine: {learning_rate: [0.3, 2], rho: [0.5], beta: [0.8, 0.9]}
epsilons: [40]
defaults: paper
privacy: {clip: 2}
rounds: {coarse: 4, fine: 4, confirm: 6}
seeds: {search: 42, contest: [], confirm: [42, 7]}
evaluate_every: 2
search: {refine: table, optuna: {batch: 8}}
"""


def study_text(resources: str = "gpus_per_host: 0") -> str:
    return f"{TEXT}resources: {{{resources}}}\n"


def run(folder: Path, text: str, view: View | None = None, backend: str = "ray") -> study_run.Finished:
    return study_run.run(parse(text, "tiny.yaml", Path.cwd()), text, folder, view or View(), backend=backend)


def rows(folder: Path) -> dict[str, Row]:
    with Ledger.read(folder) as ledger:
        return ledger.rows(ledger.outcomes())


def stages(folder: Path) -> dict[tuple[str, str, str], list[str]]:
    with Ledger.read(folder) as ledger:
        study = Study.recorded(ledger.study()[0])
        methods = {method.id: method.shown for method in study.methods}
        return {
            (f"{study.settings[cell.setting]} / {methods[cell.method]} / eps {cell.epsilon:g}", strategy, stage): keys
            for (cell, strategy, stage), keys in ledger.stages().items()
        }


def stage(folder: Path, cell: str, name: str, variant: str = "grid") -> list[Row]:
    """The rows of a stage, of a cell given by its label."""
    keys = stages(folder)[cell, variant, name]
    by_key = rows(folder)
    return [by_key[key] for key in keys]


def published(folder: Path) -> dict[str, bytes]:
    """The tables and the chosen values, which must not depend on how the trials were run."""
    files = [*sorted((folder / "tables").rglob("*")), folder / "best.yaml"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files if file.is_file()}


def content(row: Row) -> tuple:
    """Everything except the duration."""
    return row.spec, row.state, row.rounds, row.accuracy, row.loss, row.metrics, row.correct, row.epsilon_local


@pytest.fixture(scope="module")
def swept(local_ray, tmp_path_factory) -> Path:
    """The folder of a finished study: packs of any size, two client hosts."""
    folder, view = tmp_path_factory.mktemp("swept"), RecordingView()
    finished = run(folder, study_text(), view)
    assert (finished.complete, finished.failed) == (True, 0)
    assert view.looks[-1] == (30, 30), "the view is updated"
    assert all(Path(path).is_file() for path in finished.tables)
    return folder


@pytest.fixture
def copied(swept, tmp_path) -> Path:
    """A copy of that folder that a test may change."""
    return Path(shutil.copytree(swept, tmp_path / "copied"))


@pytest.fixture
def nothing_runs(monkeypatch):
    def forbidden(*arguments, **named):
        pytest.fail("a pack ran")

    monkeypatch.setattr(ray_backend, "run_slots", forbidden)
    monkeypatch.setattr("trainables.ray_actors.federation.RayFederation.__init__", forbidden)


# ---- what a sweep leaves


class RecordingView(View):
    """Records messages and the trial counts of every update."""

    def __init__(self) -> None:
        super().__init__()
        self.every = 0.0
        self.sentences: list[str] = []
        self.looks: list[tuple[int, int]] = []

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def show(self, running) -> None:
        progress = SweepProgress.of(running.sweep)
        self.looks.append((progress.trials_done, progress.trials_total))


@pytest.mark.parametrize("select", ["[contest]", "[single]"])
def test_plan_run_status_and_readme_count_the_same_trials(select, tmp_path):
    """One learning rate of the fine grid is in the coarse grid as well, and so are two of DP-FedSOFIM's points:
    such a trial counts as one everywhere."""
    text = study_text().replace("fine: {learning_rate: [0.3, 2]", "fine: {learning_rate: [0.1, 1, 2]")
    text = text.replace("search: 42, contest: []", "search: [1, 2], contest: [3, 4]")
    text = text.replace("refine: table", f"refine: table, finalists: 2, select: {select}")
    planned = planning.plan(parse(text, "tiny.yaml", Path.cwd()))
    total = sum(planned.trials.values())
    assert planned.exact
    assert f"trials: {total} (" in planned.as_text()
    view = RecordingView()
    page = run(tmp_path, text, view, "local").page
    assert view.sentences[0].endswith(" rows in the search"), "the clients of each setting"
    assert any(sentence.startswith(f"{total} trials to run, 0 done before") for sentence in view.sentences)
    assert {of for _, of in view.looks} == {total}, "opening a stage does not change it"
    assert view.looks[-1] == (total, total)
    assert f"{total} trials have finished" in page
    found = status.read(tmp_path)
    assert found["trials_ended"] == found["trials_expected"] == sum(found["trials"].values()) == total
    assert len(rows(tmp_path)) == total


def test_a_plan_is_approximate_if_results_decide_what_follows(tmp_path):
    study = parse(study_text().replace("refine: table", "refine: zoom"), "tiny.yaml", Path.cwd())
    assert "trials: about " in planning.plan(study).as_text()


def test_every_stage_is_in_the_ledger(swept):
    """10 + 3 trials of DP-FedGD, one of them in both grids, 10 + 4 of DP-FedSOFIM, two seeds each."""
    counts = {
        (cell, name): len(stage(swept, cell, name)) for cell in (GD, SOFIM) for name in ("coarse", "fine", "confirm")
    }
    assert counts == {
        (GD, "coarse"): 10,
        (GD, "fine"): 3,
        (GD, "confirm"): 2,
        (SOFIM, "coarse"): 10,
        (SOFIM, "fine"): 4,
        (SOFIM, "confirm"): 2,
    }
    assert len(rows(swept)) == 10 + 3 - 1 + 10 + 4 + 2 + 2


def test_metrics_are_recorded_by_round(swept):
    for row in rows(swept).values():
        last = row.trial.rounds
        if row.state == "done":
            assert list(row.metrics["accuracy"]) == list(row.metrics["loss"]) == list(range(2, last + 1, 2))
            assert row.metrics["accuracy"][last] == row.accuracy
            assert row.rounds == last
            assert row.seconds > 0


def test_a_diverged_lane_is_recorded_and_affects_no_other(swept):
    """A step of 1e38 is beyond single precision after a round or two."""
    found = {row.trial.hyperparameters["learning_rate"]: row.state for row in stage(swept, GD, "coarse")}
    assert found.pop(1e38) == "diverged"
    assert set(found.values()) == {"done"}
    assert len(found) == 9


def test_the_winner_is_the_best_on_the_validation_rows(swept):
    """Of both grids; ties by loss."""
    for cell in (GD, SOFIM):
        searched = [row for name in ("coarse", "fine") for row in stage(swept, cell, name) if row.state == "done"]
        best = min(searched, key=lambda row: (-row.accuracy, row.loss))
        assert best.accuracy > 100 / 3, "better than a constant prediction"
        for row in stage(swept, cell, "confirm"):
            assert row.trial.hyperparameters == best.trial.hyperparameters


def test_only_confirm_trials_use_the_test_set(swept):
    for row in rows(swept).values():
        confirm = row.trial.rounds == 6
        assert row.trial.problem.evaluate_on == ("test" if confirm else "validation")
        assert bool(row.correct) == confirm
        if confirm:
            bits = np.unpackbits(np.frombuffer(row.correct, dtype=np.uint8), count=TEST_ROWS)
            assert 100 * bits.sum() / TEST_ROWS == row.accuracy


def test_every_row_has_its_actual_epsilon(swept):
    """The claim is about local releases; the sum of four clients' noise hides more:
    mu falls by sqrt(4)."""
    for row in rows(swept).values():
        assert row.epsilon_claimed == 40
        assert 39.9 < row.epsilon_local <= 40
        assert row.epsilon_secure < 0.6 * row.epsilon_local


def test_the_folder_holds_the_documented_files(swept):
    names = {str(path.relative_to(swept)) for path in swept.rglob("*") if path.is_file()}
    kinds = ("accuracy", "hyperparameters", "rounds-to-95", "mcnemar", "privacy")
    assert {f"tables/{kind}.{ending}" for kind in kinds for ending in ("md", "csv", "tex")} <= names
    assert {"tables/README.md", "best.yaml", "study.yaml", "ledger.sqlite", "fedsweep.log"} <= names
    assert {f"timing/seconds-per-round.{ending}" for ending in ("md", "csv", "tex")} <= names
    assert "pack of" in (swept / "fedsweep.log").read_text()
    assert not (swept / ".packs").exists(), "checkpoints are removed"


# ---- again


def test_a_second_run_does_nothing_and_writes_the_same_bytes(copied, nothing_runs):
    before, ledger = published(copied), rows(copied)
    finished = run(copied, study_text())
    assert (finished.complete, finished.failed) == (True, 0)
    assert published(copied) == before
    assert rows(copied) == ledger


def test_deleted_tables_are_rebuilt_byte_for_byte(copied, nothing_runs):
    before = published(copied)
    shutil.rmtree(copied / "tables")
    (copied / "best.yaml").unlink()
    study_run.rebuild_tables(copied)
    assert published(copied) == before


def test_winners_that_did_not_change_keep_their_file(copied):
    """Its header names the plug-ins of the sweep, which need not be loaded to read it."""
    best = copied / "best.yaml"
    named = best.read_text().replace("--seed SEED\n", "--seed SEED --import own.py\n")
    for text, expected in ((named, named), ("", named.replace(" --import own.py", ""))):
        best.write_text(text)
        os.utime(best, (0, 0))
        study_run.chosen_cells(copied)
        assert best.read_text() == expected


@pytest.mark.parametrize(
    ("resources", "backend"),
    [("lanes_per_pack: auto", "local"), ("lanes_per_pack: 1", "local"), ("lanes_per_pack: 7, hosts: 1", "ray")],
)
def test_results_do_not_depend_on_the_backend_or_on_packs(swept, local_ray, tmp_path, resources, backend):
    """Twenty coarse trials were one pack on two hosts of a Ray. The local backend runs them as one pack or as twenty,
    two federations of one host as three: the ledger rows and tables are the same, byte for byte."""
    assert run(tmp_path, study_text(f"gpus_per_host: 0, {resources}"), backend=backend).complete
    assert (tmp_path / "best.yaml").read_bytes() == (swept / "best.yaml").read_bytes()
    expected, found = rows(swept), rows(tmp_path)
    assert {key: content(row) for key, row in found.items()} == {key: content(row) for key, row in expected.items()}
    assert published(tmp_path) == published(swept)


# ---- a study that changes


@pytest.fixture(scope="module")
def extended(swept, tmp_path_factory) -> tuple[Path, list[str]]:
    """A copy of the folder, its study extended by a budget and by Optuna; and its JSON lines."""
    folder = Path(shutil.copytree(swept, tmp_path_factory.mktemp("extended") / "copied"))
    text = study_text().replace("[40]", "[40, 20]").replace("search: {", "search: {strategies: [grid, optuna], ")
    lines = io.StringIO()
    with contextlib.redirect_stdout(lines):
        assert run(folder, text, JsonView(), "local").complete
    return folder, lines.getvalue().splitlines()


def test_an_extended_study_runs_only_what_is_new(swept, extended):
    before, after = rows(swept), rows(extended[0])
    assert {key: after[key] for key in before} == before, "old rows are unchanged, including durations"
    known = {stage for stage in stages(swept) if stage[1] == "grid"}
    assert {key: keys for key, keys in stages(extended[0]).items() if key in known} == stages(swept)
    new = {key for name, keys in stages(extended[0]).items() if name not in known for key in keys}
    assert set(after) - set(before) == new - set(before)
    by_budget = Counter(after[key].epsilon_claimed for key in set(after) - set(before))
    assert by_budget[20] > by_budget[40] > 0, "at the old budget only Optuna's trials are new"
    best = yaml.safe_load((extended[0] / "best.yaml").read_text())["cells"]
    cells = [GD, SOFIM, GD.replace("40", "20"), SOFIM.replace("40", "20")]
    assert set(best) == {*cells, *(f"{cell} (optuna)" for cell in cells)}
    assert best[SOFIM] == yaml.safe_load((swept / "best.yaml").read_text())["cells"][SOFIM]


def test_both_strategies_are_compared(extended):
    """With the same number of trials, in one table."""
    folder = extended[0]
    table = list(csv.DictReader(io.StringIO((folder / "tables" / "search-strategies.csv").read_text())))
    assert len(table) == 2 * 2 * 2, "budgets, methods, strategies"
    assert {(line["search"], line["method"], line["trials"]) for line in table} == {
        ("grid", "DP-FedGD", "12"),  # one of 13 is in both grids
        ("grid", "DP-FedSOFIM", "14"),
        ("optuna", "DP-FedGD", "13"),
        ("optuna", "DP-FedSOFIM", "14"),
    }
    for line in table:
        cell = f"tiny / iid / {line['method']} / eps {float(line['epsilon']):g}"
        names = ("coarse", "fine") if line["search"] == "grid" else ("optuna",)
        searched = [row for name in names for row in stage(folder, cell, name, line["search"]) if row.state == "done"]
        assert float(line["validation_accuracy"]) == pytest.approx(max(row.accuracy for row in searched))
        confirmed = [row.accuracy for row in stage(folder, cell, "confirm", line["search"])]
        assert float(line["test_mean"]) == pytest.approx(sum(confirmed) / 2)


def test_progress_as_json_lines(swept, extended):
    """Every line is a JSON object; the number of finished trials grows up to the total: at each budget (10 + 3 + 2 and
    10 + 4 + 2) trials by the grids and as many by Optuna, what both have counted once."""
    events = [json.loads(line) for line in extended[1]]
    assert {event["event"] for event in events} == {"message", "progress"}
    progress = [event for event in events if event["event"] == "progress"]
    done = [event["trials_done"] for event in progress]
    assert done == sorted(done)
    assert done[0] >= len(rows(swept)), "including those of the folder"
    all_stages = stages(extended[0]).values()
    assert sum(map(len, all_stages)) == 2 * 2 * (15 + 16)
    distinct = {key for keys in all_stages for key in keys}
    assert progress[-1]["trials_done"] == progress[-1]["trials_total"] == len(distinct)
    assert progress[-1]["trial_rounds_left"] == 0
    assert progress[-1]["retries"] == 0


def test_a_changed_setting_is_refused_and_changes_no_file(copied, nothing_runs):
    before, ledger = published(copied), (copied / "ledger.sqlite").read_bytes()
    with pytest.raises(UserError, match=r"^the study has clients = 5, the folder was made with 4; choose another"):
        run(copied, study_text().replace("clients: 4", "clients: 5"))
    assert published(copied) == before
    assert (copied / "ledger.sqlite").read_bytes() == ledger
    assert (copied / "study.yaml").read_text() == study_text()


# ---- a contest


def contest_text(resources: str) -> str:
    """Two ways to select the winner, several partitions, zoom: a small study with every stage."""
    sofim = TEXT[TEXT.index("  - dp-fedsofim") : TEXT.index("epsilons")]
    return (
        TEXT.replace(sofim, "")
        .replace("[0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 1.0e+38]", "[0.1, 1]")
        .replace("search: 42, contest: []", "search: [1, 2], contest: [3, 4], partition: [5, 6]")
        .replace("search: {refine: table, ", "search: {refine: zoom, finalists: 3, select: [contest, single], ")
        + f"resources: {{gpus_per_host: 0, {resources}}}\n"
    )


def test_a_contest_does_not_depend_on_packs_or_on_interruptions(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(whole, contest_text("hosts: 2"), backend="local").complete
    run(cut, contest_text("hosts: 1, lanes_per_pack: 2"), backend="local")
    assert published(cut) == published(whole)
    assert {"tables/selection.md", "tables/partitions.md", "tables/search-strategies.md"} <= set(published(whole))
    contest = stage(whole, GD, "contest")
    assert len(contest) == 3 * 2
    assert {(row.rounds, row.trial.problem.evaluate_on, bool(row.correct)) for row in contest} == {
        (6, "validation", False)
    }
    # a driver that died in the middle of the contest: half of its rows and all that came after are not there
    lost = [row.key for row in contest[::2]]
    with contextlib.closing(sqlite3.connect(cut / "ledger.sqlite")) as ledger, ledger:
        ledger.executemany(f"DELETE FROM trials WHERE {HAS_KEY}", [(key,) for key in lost])
        ledger.execute("DELETE FROM stages WHERE stage = 'confirm' AND strategy = 'grid'")
    assert run(cut, contest_text("hosts: 2, lanes_per_pack: 4"), backend="local").complete
    assert published(cut) == published(whole)
    assert stages(cut) == stages(whole)


# ---- successive halving


def test_rungs_equal_the_first_rounds_of_whole_runs(swept, local_ray, tmp_path):
    """A trial that ends early has the metrics of the whole trial up to there, and the privacy account of all rounds."""
    method = TEXT[TEXT.index("  - dp-fedgd:") : TEXT.index("  - dp-fedsofim:")]
    halving = "search: {strategies: [halving], trials: 4, halving: {rungs: 2, keep: 0.5}, "
    finished = run(tmp_path, study_text().replace(method, "").replace("search: {", halving))
    assert (finished.complete, finished.failed) == (True, 0)
    first, last = (stage(tmp_path, SOFIM, rung, "halving") for rung in ("rung-1", "rung-2"))
    assert [(len(rung), {row.rounds for row in rung}) for rung in (first, last)] == [(4, {2}), (2, {4})]
    begun = {str(row.trial.hyperparameters): row for row in first}
    for row in last:
        before = begun[str(row.trial.hyperparameters)]
        assert (before.state, before.accuracy) == ("done", row.metrics["accuracy"][2])
        assert before.metrics == {metric: {2: values[2]} for metric, values in row.metrics.items()}
        assert (before.epsilon_local, before.epsilon_claimed) == (row.epsilon_local, row.epsilon_claimed)
    best = sorted(first, key=lambda row: (-row.accuracy, row.loss))[:2]
    assert {row.trial.hyperparameters["learning_rate"] for row in best} == {
        row.trial.hyperparameters["learning_rate"] for row in last
    }


# ---- the commands


def test_training_a_winner_again_gives_the_same_bits(swept, no_ray, fedsweep):
    row = next(row for row in stage(swept, SOFIM, "confirm") if row.trial.seed == 7)
    code, out, _ = fedsweep("train", "--from", swept / "best.yaml", "--cell", SOFIM, "--seed", 7, "--json")
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert found["key"] == row.key
    assert found["metrics"] == json.loads(json.dumps(row.metrics))
    assert found["accuracy"]["6"] == row.accuracy
    best = yaml.safe_load((swept / "best.yaml").read_text())["cells"][SOFIM]
    assert best["test_accuracy"][7] == row.accuracy


def test_an_unknown_cell_is_refused(swept, fedsweep, nothing_runs):
    code, _, err = fedsweep("train", "--from", swept / "best.yaml", "--cell", "nonsense")
    assert code == 2
    assert "cell = 'nonsense' is not in" in err
    assert GD in err


def test_status_of_a_finished_study(swept, fedsweep):
    code, out, _ = fedsweep("status", swept, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["finished"] is True
    assert found["running"] is None
    assert (found["study"], found["cells_ended"], found["cells_total"]) == ("tiny", 2, 2)
    assert found["trials"] == {"diverged": 1, "done": 29}
    assert (found["failed"], found["retries"]) == ({}, [])
    assert found["cells"][0]["stages"]["confirm"] == {"done": 2, "total": 2}
    code, out, _ = fedsweep("status", swept)
    assert out.startswith("study tiny: finished, 2 of 2 cells ended\n")


def test_best_and_tables(copied, fedsweep, nothing_runs):
    before = published(copied)
    code, out, _ = fedsweep("best", copied, "--json")
    assert code == 0
    assert json.loads(out)[SOFIM]["hyperparameters"] == stage(copied, SOFIM, "confirm")[0].trial.hyperparameters
    code, out, _ = fedsweep("tables", copied)
    assert code == 0
    assert {Path(line).name for line in out.splitlines()} >= {"accuracy.md", "README.md", "best.yaml"}
    assert published(copied) == before


def test_resume_of_a_finished_study_shows_its_tables(copied, fedsweep, nothing_runs):
    before = published(copied)
    code, out, err = fedsweep("resume", copied)
    assert code == 0
    assert out.strip() == (copied / "tables" / "README.md").read_text().strip()
    assert f"tables: {copied / 'tables'}" in err.replace("\n", "")
    assert published(copied) == before


def test_resume_of_a_finished_study_as_json(copied, fedsweep, nothing_runs):
    code, out, _ = fedsweep("resume", copied, "--json")
    assert code == 0
    last = json.loads(out.splitlines()[-1])
    assert (last["event"], last["folder"], last["failed"]) == ("finished", str(copied), 0)
    assert str(copied / "best.yaml") in last["tables"]
