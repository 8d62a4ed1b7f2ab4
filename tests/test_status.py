"""Status: elapsed time, rate, remaining time and the best cells, from ledgers with a clock that the test sets."""

import large
import pytest
from handmade_ledgers import LAST, Writer, study, writing
from simulated_search import GD, drive, near
from simulated_search import study as search_study

from orchestrator.results import ledger as ledgers
from orchestrator.results import status
from orchestrator.results.ledger import Ledger, Stall
from orchestrator.results.winners import Results, record_winners

FEDGD = [({"learning_rate": rate}, score) for rate, score in ((0.01, 40.0), (0.1, 60.0), (1.0, 50.0))]


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances."""

    class Clock:
        now = 1000.0

        def time(self):
            return self.now

    fake = Clock()
    monkeypatch.setattr(ledgers, "time", fake)
    monkeypatch.setattr(status, "time", fake)
    return fake


def one_budget(**changes):
    return study(epsilons=[8], methods=["dp-fedgd"], **changes)


def read(folder, running=None):
    with Ledger.read(folder) as ledger:
        return status.of(ledger, "here", running)


def test_elapsed_time_rate_and_remaining_time(tmp_path, clock):
    """Three trials of 20 rounds; over an hour passes between the first driver and the second."""
    with writing(tmp_path, one_budget()) as writer:
        writer.ledger.begin_session()
        clock.now = 1010.0
        writer.search("dp-fedgd", 8, {"coarse": FEDGD[:1]})
        clock.now = 1014.0
    timing = read(tmp_path)["time"]
    assert timing["elapsed_s"] == 10.0, "a driver that has exited counts until its last batch"
    assert timing["trial_rounds_per_second"] == LAST / 10, "the rate of a single batch is measured from the start"
    assert read(tmp_path, "a driver")["time"]["elapsed_s"] == 14.0, "a running driver counts until now"

    clock.now = 5000.0
    with Ledger.write(tmp_path) as ledger:
        writer = Writer(ledger, one_budget())
        ledger.begin_session()
        for seconds, member in zip((5010.0, 5014.0), FEDGD[1:], strict=True):
            clock.now = seconds
            writer.search("dp-fedgd", 8, {"fine": [member]})
    summary = read(tmp_path)
    assert summary["time"]["elapsed_s"] == 10.0 + 14.0
    assert summary["time"]["trial_rounds_per_second"] == LAST / 4, "with several batches the rate excludes the first"
    assert summary["confirm"] == {"done": 0, "total": 2}, "the total is known before the stage opens"
    assert summary["trials_expected"] == sum(summary["cells"][0]["expected"].values())
    remaining = summary["trials_expected"] - 1 - 1  # the stages table has one coarse and one fine trial
    assert summary["time"]["left_s"] == pytest.approx(remaining * LAST / (LAST / 4))
    text = status.as_text(summary)
    assert "time: 24 s, 5 trial-rounds/s, about" in text
    assert "of confirm 0 of 2" in text
    assert "once resumed" in text


def test_the_best_method_of_every_budget(tmp_path):
    with writing(tmp_path, study()) as writer:
        for epsilon, score in ((1, 60.0), (8, 70.0)):
            writer.search("dp-fedgd", epsilon, {"coarse": [({"learning_rate": 0.1}, 55.0)]})
            writer.search("dp-fedadam", epsilon, {"coarse": [({"learning_rate": 0.1}, score - 20 * (epsilon == 8))]})
    best = status.best_texts(read(tmp_path))
    assert best[0].startswith("toy / iid, eps 1: DP-FedAdam, validation 60.00% (learning_rate=0.1")
    assert best[1] == "toy / iid, eps 8: DP-FedGD, validation 55.00% (learning_rate=0.1)"


def test_a_finished_study_has_no_remaining_time(tmp_path):
    with writing(tmp_path, one_budget()) as writer:
        writer.ledger.begin_session()
        writer.search("dp-fedgd", 8, {"coarse": FEDGD, "fine": FEDGD[:1]})
        writer.confirm("dp-fedgd", 8, FEDGD[1][0], {42: {20: 61.0}, 7: {20: 62.0}})
    summary = read(tmp_path)
    assert summary["finished"]
    assert summary["time"]["left_s"] == 0.0
    assert summary["trials_expected"] == len(FEDGD) + 2, "each trial counts once: the fine trial is also a coarse one"
    assert summary["confirm"] == {"done": 2, "total": 2}
    assert "best in the search: toy / iid, eps 8" in status.as_text(summary)


def test_adding_existing_rows_leaves_sessions_unchanged(tmp_path):
    with writing(tmp_path, one_budget()) as writer:
        writer.ledger.begin_session()
        writer.search("dp-fedgd", 8, {"coarse": FEDGD})
        before = writer.ledger.sessions()
        writer.search("dp-fedgd", 8, {"coarse": FEDGD})
        assert writer.ledger.sessions() == before


def test_a_pack_without_progress_is_shown_instead_of_the_time_left(tmp_path, clock):
    with writing(tmp_path, one_budget()) as writer:
        writer.ledger.begin_session()
        clock.now = 1010.0
        writer.search("dp-fedgd", 8, {"coarse": FEDGD[:1]})
        writer.ledger.set_stalls([Stall("10.0.0.7", 12, 1020.0)])
    clock.now = 1100.0
    text = status.as_text(read(tmp_path, "a driver"))
    assert "no progress for 80 s on node 10.0.0.7: a pack of 12 trials" in text
    assert "left" not in text
    assert "no progress" not in status.as_text(read(tmp_path)), "the driver has ended, and its packs with it"


def test_trials_are_counted_by_node(tmp_path):
    """A federation may be spread over nodes."""
    drive(tmp_path, search_study(methods=[GD]), near(0.3), node_of=lambda trial: "ab"[trial.rounds == 6])
    found = status.read(tmp_path)
    assert found["nodes"] == {"a": 6, "b": 2}
    assert "by node: a 6, b 2" in status.as_text(found)
    assert "by code" not in status.as_text(found)
    assert "by code: abc 6, def 2" in status.as_text({**found, "code": {"abc": 6, "def": 2}})


def test_status_reads_counts_and_winners_only(tmp_path):
    """SQLite takes as many steps with 1,000 trials as with 100."""
    steps = {}
    for configurations in (50, 500):
        folder = tmp_path / str(configurations)
        large.write(folder, one_budget(), configurations)
        with Ledger.write(folder) as ledger:
            record_winners(ledger, Results.read(ledger))
            taken: list[int] = []
            ledger._db.set_progress_handler(lambda taken=taken: taken.append(1), 1)
            found = status.of(ledger, "here", None)
            steps[found["trials_ended"]] = len(taken)
    (few, many), (steps_few, steps_many) = steps.keys(), steps.values()
    assert many > 5 * few
    assert steps_many < 1.1 * steps_few


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (5399, "90 min"), (5401, "1.5 h")]
)
def test_durations(seconds, shown):
    assert status.duration(seconds) == shown
