"""A search strategy as a plug-in, as docs/write-a-strategy.md describes it."""

import dataclasses

import pytest
from plugin_registry import temporary_plugins
from repository_files import DOCS, REPOSITORY, blocks
from simulated_search import drive, near

from orchestrator.execution.cell_search import CellSearch
from orchestrator.execution.planning import plan
from orchestrator.results import status
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.reading import load, parse
from trainables import plugins
from trainables.errors import UserError

EXAMPLE = REPOSITORY / "examples" / "plugin" / "halton.py"
STUDY = EXAMPLE.with_suffix(".yaml")
PAGE = DOCS / "write-a-strategy.md"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.setenv("FEDSWEEP_IMPORT", "")
    with temporary_plugins():
        plugins.use(str(EXAMPLE))
        yield


def test_without_the_plug_in_the_strategy_is_unknown():
    with pytest.raises(UserError, match=r"halton\.yaml:11: search\.halton: .*--import MODULE"):
        load(str(STUDY))


EXAMPLES = {"climb": 0, "halton": 1}
"""The position of each example's blocks on the page."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_shows_the_example_as_it_is(name):
    assert EXAMPLE.with_stem(name).read_text().endswith(blocks(PAGE, "python")[EXAMPLES[name]])
    assert STUDY.with_stem(name).read_text().endswith(blocks(PAGE, "yaml")[EXAMPLES[name]])


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_can_be_copied_from_the_page_and_run(tmp_path, monkeypatch, fedsweep, name):
    (tmp_path / f"{name}.py").write_text(blocks(PAGE, "python")[EXAMPLES[name]])
    (tmp_path / f"{name}.yaml").write_text(blocks(PAGE, "yaml")[EXAMPLES[name]])
    command = blocks(PAGE)[EXAMPLES[name]]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSWEEP_IMPORT", "")
    with temporary_plugins():
        status, _, err = fedsweep(*command.split()[1:], "--backend", "local")
    assert status == 0, err
    assert name in (tmp_path / "results" / name / "tables" / "trials.csv").read_text()


def test_the_settings_of_a_plug_in_are_checked_with_their_line(example):
    text = STUDY.read_text().replace("batch: 6", "batch: 0")
    with pytest.raises(UserError, match=r"halton\.yaml:11: search\.halton\.batch: .*greater than or equal to 1"):
        parse(text, "halton.yaml", None)


def test_the_search_stops_when_a_batch_brings_nothing_and_resumes_with_the_same_trials(example, tmp_path):
    study, _ = load(str(STUDY))
    assert plan(study).trials["halton"] == 48 * 2
    whole = drive(tmp_path / "whole", study, near(0.3))
    assert whole.finished
    tried = whole.stages[PreparedStudy.prepare(study).cells[0].id, "halton", "halton"]
    assert 6 * 2 * 2 < len(tried) < 48 * 2, "two batches at least, and fewer than the budget"
    for stop in (1, 20, 40, 60):
        part = tmp_path / str(stop)
        drive(part, study, near(0.3), stop_after=stop)
        assert drive(part, study, near(0.3)).stages == whole.stages
    assert status.read(tmp_path / "whole")["finished"]


def test_proposals_do_not_depend_on_the_order_of_results(example):
    study, _ = load(str(STUDY))
    cell, variant = PreparedStudy.prepare(study).cells[0], study.variants[1]
    proposals = []
    for order in (1, -1):
        outcomes = {}
        search = CellSearch(cell, variant, outcomes, 10)
        stage, trials = search.next_stage()
        search.open(stage, trials)
        outcomes.update({trial.key: near(0.3)(trial) for trial in trials[::order]})
        proposals.append(variant.strategy.propose(search.task, dataclasses.replace(search.history, memo={})))
    assert proposals[0] == proposals[1] is not None


def test_a_stage_that_the_strategy_does_not_declare_is_refused(example, monkeypatch):
    study, _ = load(str(STUDY))
    search = CellSearch(PreparedStudy.prepare(study).cells[0], study.variants[1], {}, 10)
    monkeypatch.setattr(type(search.variant.strategy), "stages", ("other",))
    with pytest.raises(UserError, match="strategy halton proposed stage 'halton', which is not in its `stages`"):
        search.next_stage()
