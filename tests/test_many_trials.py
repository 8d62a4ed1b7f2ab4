"""What keeps a study of a million trials small gives the same results as for a small study."""

import pandas as pd
import pytest
import reported
from simulated_search import drive, near, study

from orchestrator.execution import sweep
from orchestrator.report.tables import trials_file
from orchestrator.report.tables.render import frame_to_csv
from orchestrator.results import frames
from orchestrator.results.ledger import Ledger
from orchestrator.results.searches import search_records
from orchestrator.results.spec_parts import read_parts
from orchestrator.results.winners import Results
from orchestrator.search.candidates import paired_difference, within_standard_error
from trainables.federation.trial_spec import TrialSpec


@pytest.mark.parametrize("most", [1, 4])
def test_searches_that_open_later_run_the_same_trials(tmp_path, monkeypatch, most):
    at_once = drive(tmp_path / "at once", study(), near(0.3)).stages
    monkeypatch.setattr(sweep, "OPEN_TRIALS", most)
    assert drive(tmp_path / "later", study(), near(0.3)).stages == at_once


def test_recorded_winners_are_those_of_the_trials(tmp_path):
    drive(tmp_path, study(), near(0.3))
    with Ledger.read(tmp_path) as ledger:
        found = Results.read(ledger).study
        recorded, computed = (list(search_records(ledger, found, verified=verified)) for verified in (False, True))
        assert all(record.known_winner for record in recorded)
        for known, other in zip(recorded, computed, strict=True):
            assert known.winner is not None
            assert other.winner is not None
            assert (known.winner.candidate, known.winner.score) == (other.winner.candidate, other.winner.score)


def lines(values: list) -> list[dict]:
    """Rows of trials.csv; None: the trial has no such hyperparameter."""
    names = [{"key": str(number)} | ({} if value is None else {"x": value}) for number, value in enumerate(values)]
    return [dict.fromkeys(frames.TRIAL_COLUMNS, 0.1 + 0.2) | line for line in names]


@pytest.mark.parametrize(
    "values",
    [
        [1, 2],
        [1, 2.5, 1e-7],
        [None, 3, 12],
        [None, 0.1 + 0.2, 7],
        [True, None, False],
        [True, 1, None],
        ["auto", "none", None],
        ["auto", 0.1 + 0.2],
        [True, 0.1 + 0.2],
        [10**12, None],
        ["=1+1", "a,b", 'c"d'],
        [None, None],
    ],
    ids=str,
)
def test_trials_are_written_as_their_frame_would_be(tmp_path, monkeypatch, values):
    reported.write(tmp_path)
    monkeypatch.setattr(frames, "trial_lines", lambda ledger, results: iter(lines(values)))
    monkeypatch.setattr(trials_file, "LINES", 1)
    with Ledger.read(tmp_path) as ledger:
        results = Results.read(ledger)
        written = trials_file.write_trials(tmp_path / "trials.csv", ledger, results).read_text()
        frame = frames.trials(ledger, results).drop(columns="seconds")
    assert written == frame_to_csv(frame)
    assert len(pd.read_csv(tmp_path / "trials.csv")) == len(values)


def test_parts_of_a_specification_are_read_as_the_whole(tmp_path):
    drive(tmp_path, study(), near(0.3))
    with Ledger.read(tmp_path) as ledger:
        for row in ledger.rows(ledger.outcomes()).values():
            assert read_parts(row.spec) == row.content
            assert TrialSpec.model_validate(row.content) == row.trial


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"hyperparameters":1,"privacy":2}',
        '{"a":"\\"hyperparameters\\":{},\\"privacy\\":"}',
        '{"hyperparameters":{},"privacy":{},"hyperparameters":{"x":1}}',
    ],
)
def test_texts_of_another_form_are_not_read_in_parts(text):
    assert read_parts(text) is None


@pytest.mark.parametrize("theirs", [[50.0, 51.0, 52.0], [51.0, 51.0, 51.0], [50.5, None, 52.5], [None, None, None]])
def test_within_the_standard_error(theirs):
    ours = [51.0, 51.5, 52.5]
    exact = paired_difference(ours, theirs)
    assert within_standard_error(ours, theirs) == (exact is not None and abs(exact[0]) <= exact[1])
