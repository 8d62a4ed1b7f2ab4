"""Status: elapsed time, rate, what is left and who leads, from ledgers whose clock the test turns."""

import pytest
from handmade_ledgers import LAST, Writer, study, writing

from orchestrator.results import ledger as ledgers
from orchestrator.results import status
from orchestrator.results.ledger import Ledger

FEDGD = [({"learning_rate": rate}, score) for rate, score in ((0.01, 40.0), (0.1, 60.0), (1.0, 50.0))]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is turned."""

    class Clock:
        now = 1000.0

        def time(self):
            return self.now

    turned = Clock()
    monkeypatch.setattr(ledgers, "time", turned)
    monkeypatch.setattr(status, "time", turned)
    return turned


def one_budget(**changes):
    return study(epsilons=[8], methods=["dp-fedgd"], **changes)


def read(folder, running=None):
    with Ledger.read(folder) as ledger:
        return status.of(ledger, "here", running)


def test_time_rate_and_what_is_left(tmp_path, clock):
    """Three trials of 20 rounds, one every 4 s after the first; then an hour of nothing and a second driver."""
    with writing(tmp_path, one_budget()) as writer:
        writer.ledger.begin_session()
        clock.now = 1010.0
        writer.search("dp-fedgd", 8, {"coarse": FEDGD[:1]})
        clock.now = 1014.0
    found = read(tmp_path)["time"]
    assert found["elapsed_s"] == 10.0, "a driver that is gone worked until its last batch"
    assert found["trial_rounds_per_second"] == LAST / 10, "a single batch counts from the start"
    assert read(tmp_path, "someone")["time"]["elapsed_s"] == 14.0, "one that runs works now"

    clock.now = 5000.0
    with Ledger.write(tmp_path) as ledger:
        writer = Writer(ledger, one_budget())
        ledger.begin_session()
        for seconds, member in zip((5010.0, 5014.0), FEDGD[1:], strict=True):
            clock.now = seconds
            writer.search("dp-fedgd", 8, {"fine": [member]})
    found = read(tmp_path)
    assert found["time"]["elapsed_s"] == 10.0 + 14.0
    assert found["time"]["trial_rounds_per_second"] == LAST / 4, "the first batch of several is not counted"
    assert found["confirm"] == {"done": 0, "total": 2}, "known before its stage is open"
    assert found["trials_expected"] == sum(found["cells"][0]["expected"].values())
    left = found["trials_expected"] - 1 - 1  # one of coarse and, as the stages table has it, one of fine
    assert found["time"]["left_s"] == pytest.approx(left * LAST / (LAST / 4))
    text = status.as_text(found)
    assert "time: 24 s, 5 trial-rounds/s, about" in text
    assert "of confirm 0 of 2" in text
    assert "once resumed" in text


def test_the_leader_of_every_budget(tmp_path):
    with writing(tmp_path, study()) as writer:
        for epsilon, best in ((1, 60.0), (8, 70.0)):
            writer.search("dp-fedgd", epsilon, {"coarse": [({"learning_rate": 0.1}, 55.0)]})
            writer.search("dp-fedadam", epsilon, {"coarse": [({"learning_rate": 0.1}, best - 20 * (epsilon == 8))]})
    found = status.best_texts(read(tmp_path))
    assert found[0].startswith("toy / iid, eps 1: DP-FedAdam, validation 60.00% (learning_rate=0.1")
    assert found[1] == "toy / iid, eps 8: DP-FedGD, validation 55.00% (learning_rate=0.1)"


def test_a_finished_study_has_nothing_left(tmp_path):
    with writing(tmp_path, one_budget()) as writer:
        writer.ledger.begin_session()
        writer.search("dp-fedgd", 8, {"coarse": FEDGD, "fine": FEDGD[:1]})
        writer.confirm("dp-fedgd", 8, FEDGD[1][0], {42: {20: 61.0}, 7: {20: 62.0}})
    found = read(tmp_path)
    assert found["finished"]
    assert found["time"]["left_s"] == 0.0
    assert found["trials_expected"] == len(FEDGD) + 2, "each trial once: the fine one is a coarse one, too"
    assert found["confirm"] == {"done": 2, "total": 2}
    assert "best in the search: toy / iid, eps 8" in status.as_text(found)


def test_handing_in_what_is_there_already_leaves_no_trace(tmp_path):
    with writing(tmp_path, one_budget()) as writer:
        writer.ledger.begin_session()
        writer.search("dp-fedgd", 8, {"coarse": FEDGD})
        before = writer.ledger.sessions()
        writer.search("dp-fedgd", 8, {"coarse": FEDGD})
        assert writer.ledger.sessions() == before


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (5399, "90 min"), (5401, "1.5 h")]
)
def test_durations(seconds, shown):
    assert status.duration(seconds) == shown
